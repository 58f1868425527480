# SPDX-License-Identifier: Apache-2.0
"""Cinder with two back ends of RBD and two of files on NFS shares.

Its volume service runs in a mount namespace of its own: there the cluster's folder is
``/etc/ceph``, where os-brick looks for a user's key, and the shares are mounted. The
machine sees nothing of either, and both end with the service.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from bed.bed import LOOPBACK
from bed.ceph import Ceph
from bed.databases import MariaDB
from bed.keystone import Keystone
from bed.rabbitmq import RabbitMQ
from bed.services import QUIET, Service, Services

#: Pools by the name of the back end, which is that of the volume type too.
RBD = {"rbd1": "volumes", "rbd2": "volumes2"}
NFS = ("nfs1", "nfs2")

_CONF = """\
[DEFAULT]
use_stderr = true
host = testbed
my_ip = {ip}
transport_url = {rabbitmq}
auth_strategy = keystone
state_path = {folder}
image_conversion_dir = {folder}/conversion
api_paste_config = {venv}/etc/cinder/api-paste.ini
resource_query_filters_file = {venv}/etc/cinder/resource_filters.json
glance_api_servers = {glance}
enabled_backends = {backends}
default_volume_type = rbd1
# The first report tells that a service is ready.
report_interval = 2
graceful_shutdown_timeout = 2
backend_stats_polling_interval = 30

[database]
connection = {database}

[oslo_concurrency]
lock_path = {folder}/locks

[oslo_messaging_rabbit]
rabbit_quorum_queue = false

[keystone_authtoken]
www_authenticate_uri = {keystone}
service_token_roles = service
service_token_roles_required = true
{login}
[service_user]
send_service_user_token = true
{login}
[nova]
{login}
[key_manager]
backend = cinder.keymgr.conf_key_mgr.ConfKeyManager
fixed_key = 0000000000000000000000000000000000000000000000000000000000000001
"""

_RBD = """
[{name}]
volume_driver = cinder.volume.drivers.rbd.RBDDriver
volume_backend_name = {name}
rbd_pool = {pool}
rbd_ceph_conf = {ceph}
rbd_user = cinder
rbd_secret_uuid = {secret}
rbd_exclusive_cinder_pool = true
report_dynamic_total_capacity = false
rbd_flatten_volume_from_snapshot = false
"""

_NFS = """
[{name}]
volume_driver = cinder.volume.drivers.nfs.NfsDriver
volume_backend_name = {name}
nas_host = {ip}
nas_share_path = {folder}/{name}
nfs_mount_point_base = {folder}/mnt
nas_secure_file_operations = false
nas_secure_file_permissions = false
nfs_snapshot_support = true
nfs_sparsed_volumes = true
max_over_subscription_ratio = 50
"""

#: First in PATH of the volume service.
_PROGRAMS = {
    # No NFS in the kernel: the folder behind a share is bound to where it goes.
    "mount": """\
#!/bin/sh
case " $* " in
*" -t nfs"*) ;;
*) exec /usr/bin/mount "$@" ;;
esac
while [ $# -gt 2 ]; do shift; done
exec /usr/bin/mount --bind "${1#*:}" "$2"
""",
    # The driver only looks whether it is there.
    "mount.nfs": """\
#!/bin/sh
exit 0
""",
    # It is the administrator already, and what rootwrap lets pass is not the question.
    "sudo": """\
#!/bin/sh
[ "$1" = cinder-rootwrap ] && shift 2
exec "$@"
""",
}

_REPORTED = """\
select `binary`, count(*) from cinder.services where report_count > 0 group by `binary`
"""
_LIMITS = ("volumes", "snapshots", "gigabytes", "per_volume_gigabytes", "groups")
_LATEST = "volume 3.67"


class Cinder(Service):
    name = "cinder"
    needs = (*("mariadb", "services", "keystone", "glance", "rabbitmq", "ceph"),)
    programs = ("unshare", "qemu-img", "rbd")
    processes = ("cinder-volume", "cinder-scheduler", "cinder")

    def missing(self) -> list[str]:
        lack = super().missing()
        # Something is bound to it, which only root could make.
        return lack if Path("/etc/ceph").is_dir() else [*lack, "/etc/ceph"]

    @property
    def secret_uuid(self) -> str:
        """Of the secret with the key of Ceph's user, for libvirt."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self.bed.folder}/cinder"))

    def env(self) -> dict[str, str]:
        return {"IMAGEBACKEND_CINDER_SECRET": self.secret_uuid}

    def write_files(self) -> None:
        for each in ("conversion", "mnt", *NFS):
            (self.folder / each).mkdir(exist_ok=True)
        self.write_conf(self._text())
        programs = self.folder / "bin"
        programs.mkdir(exist_ok=True)
        for name, text in _PROGRAMS.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    def _text(self) -> str:
        keystone = Keystone(self.bed)
        ceph = Ceph(self.bed).conf
        text = _CONF.format(
            ip=LOOPBACK,
            folder=self.folder,
            venv=Services.venv,
            database=self.database,
            rabbitmq=RabbitMQ(self.bed).url,
            keystone=keystone.url,
            login=keystone.login("cinder"),
            glance=f"http://{LOOPBACK}:{self.bed.port('glance')}",
            backends=",".join((*RBD, *NFS)),
        )
        for name, pool in RBD.items():
            secret = self.secret_uuid
            text += _RBD.format(name=name, pool=pool, ceph=ceph, secret=secret)
        for name in NFS:
            text += _NFS.format(name=name, ip=LOOPBACK, folder=self.folder)
        return text

    def make_tables(self) -> None:
        self.manage("db", "sync")

    def start(self) -> None:
        if self.running():
            return
        services = Services(self.bed)
        conf = ("--config-file", str(self.conf))
        MariaDB(self.bed).sql("update cinder.services set report_count = 0")
        path = f"{self.folder}/bin:{Services.venv}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.bed.start(
            "cinder-volume",
            [
                *("unshare", "--mount", *_as_root(), "sh", "-c"),
                *(
                    'mount --bind "$0" /etc/ceph && exec "$@"',
                    str(Ceph(self.bed).folder),
                ),
                *(services.program("cinder-volume"), *conf),
            ],
            {**QUIET, "PATH": path},
        )
        self.bed.start(
            "cinder-scheduler", [services.program("cinder-scheduler"), *conf], QUIET
        )
        self.serve("cinder", arguments=" ".join(conf))
        self._wait_for("cinder-scheduler", 1)
        self._wait_for("cinder-volume", len(RBD) + len(NFS))

    def _wait_for(self, process: str, count: int) -> None:
        """Until all of its services have reported: then they take calls."""
        sql = MariaDB(self.bed).sql
        line = f"{process}\t{count}"
        self.bed.wait(process, lambda: line in sql(_REPORTED).splitlines())

    def fill(self) -> None:
        client = Keystone(self.bed).client(self, **{"OpenStack-API-Version": _LATEST})
        # Options of that name are ignored.
        limits = {"quota_class_set": dict.fromkeys(_LIMITS, -1)}
        client.call("PUT", "/v3/os-quota-class-sets/default", limits)
        for name in (*RBD, *NFS):
            kind = {"name": name, "extra_specs": {"volume_backend_name": name}}
            client.call("POST", "/v3/types", {"volume_type": kind})


def _as_root() -> list[str]:
    """Mounts are for root; another user is it in a namespace of its own."""
    return [] if os.geteuid() == 0 else ["--map-root-user"]
