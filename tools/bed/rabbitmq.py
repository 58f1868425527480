# SPDX-License-Identifier: Apache-2.0
"""RabbitMQ, one node with a port mapper (epmd) of its own."""

from __future__ import annotations

from bed.bed import LOOPBACK, Part

#: The package's own start script; the one in PATH changes the user and the folder.
_PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"
_USER = "testbed"
_CONF = """\
listeners.tcp.1 = {ip}:{port}
default_user = {user}
default_pass = {password}
vm_memory_high_watermark.absolute = 1GB
disk_free_limit.absolute = 100MB
log.file = false
log.console = true
log.console.level = warning
"""
#: Distribution on loopback only; two schedulers, which do not spin when idle.
_ERLANG = (
    "-kernel inet_dist_use_interface {127,0,0,1} "
    "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
)


class RabbitMQ(Part):
    name = "rabbitmq"
    programs = (_PROGRAM, "epmd")
    processes = ("rabbitmq", "epmd")

    def up(self) -> None:
        if self.running():
            return
        port = self.bed.port
        self.folder.mkdir(exist_ok=True)
        conf = self.folder / "rabbitmq.conf"
        conf.touch(0o600)
        conf.write_text(
            _CONF.format(
                ip=LOOPBACK,
                port=port("rabbitmq"),
                user=_USER,
                password=self.bed.secret("rabbitmq"),
            )
        )
        (self.folder / "plugins").write_text("[].\n")
        (self.folder / "env").touch()
        mapper = str(port("epmd"))
        self.bed.start(
            "epmd", ["epmd", "-port", mapper, "-address", LOOPBACK], ports=("epmd",)
        )
        self.bed.wait("epmd", self.bed.listens("epmd"))
        self.bed.start(
            "rabbitmq",
            [_PROGRAM],
            {
                # Erlang keeps the node's cookie in it.
                "HOME": str(self.folder),
                "ERL_EPMD_ADDRESS": LOOPBACK,
                "ERL_EPMD_PORT": mapper,
                "RABBITMQ_NODENAME": "testbed@localhost",
                "RABBITMQ_DIST_PORT": str(port("rabbitmq-nodes")),
                "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
                "RABBITMQ_LOG_BASE": str(self.bed.log),
                "RABBITMQ_CONFIG_FILE": str(conf),
                # Not those of the machine, in /etc/rabbitmq.
                "RABBITMQ_CONF_ENV_FILE": str(self.folder / "env"),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
                "RABBITMQ_PID_FILE": str(self.folder / "pid"),
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _ERLANG,
            },
            ports=("rabbitmq", "rabbitmq-nodes"),
        )
        self.bed.wait("rabbitmq", self.bed.listens("rabbitmq"))

    @property
    def url(self) -> str:
        word = self.bed.secret("rabbitmq")
        return f"rabbit://{_USER}:{word}@{LOOPBACK}:{self.bed.port('rabbitmq')}/"

    def where(self) -> str:
        return self.url
