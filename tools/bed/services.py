# SPDX-License-Identifier: Apache-2.0
"""What Keystone, Glance and Cinder have in common: the virtual environment that they
run from, a database, uWSGI, and the little of an API's client that a start needs."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bed.bed import LOOPBACK, BedError, Part
from bed.databases import MariaDB

REGION = "RegionOne"
#: The whole of what is asked for; constraints.txt has the releases of the rest.
_PACKAGES = ("keystone==30.*", "glance==33.*", "cinder==29.*", "PyMySQL", "uwsgi", "uv")
_CONSTRAINTS = Path(__file__).with_name("constraints.txt")
#: Debian's Python: its bindings for Ceph are made for it.
_PYTHON = "/usr/bin/python3"
_BINDINGS = ("rados", "rbd")
#: They warn of each other: an error's last lines should be its own.
QUIET = {"PYTHONWARNINGS": "ignore"}


class Services(Part):
    """The virtual environment. It is no part of the bed's data: every bed of this tree
    shares it, and a wipe leaves it alone."""

    name = "services"
    programs = (_PYTHON, "gcc")
    venv = Path(__file__).resolve().parents[2] / ".testbed" / "services"

    def missing(self) -> list[str]:
        if self.running():
            return []
        lack = super().missing()
        if not list(Path("/usr/include").glob("python3*/Python.h")):
            lack.append("Python.h")
        return lack

    def up(self) -> None:
        if self.running():
            return
        self.venv.parent.mkdir(parents=True, exist_ok=True)
        with open(self.venv.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another bed may be at it
            if not self.running():
                self._install()

    def running(self) -> bool:
        try:
            return self._stamp.read_text() == self._wanted()
        except FileNotFoundError:
            return False

    def where(self) -> str:
        return str(self.venv)

    def program(self, name: str) -> str:
        return str(self.venv / "bin" / name)

    @property
    def _stamp(self) -> Path:
        return self.venv / "stamp"

    def _wanted(self) -> str:
        # The path: a virtual environment does not outlive a move.
        return "\n".join((str(self.venv), *_PACKAGES, _CONSTRAINTS.read_text()))

    def _install(self) -> None:
        self.bed.say(f"installing the services into {self.venv}")
        # The caller's proxies, indexes and caches are for this, its Python is not.
        env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("PYTHON")
        }
        limits = ("-c", str(_CONSTRAINTS))
        self.bed.call([_PYTHON, "-m", "venv", "--clear", self.venv])
        pip = (self.program("python"), "-m", "pip", "install", "-q")
        self.bed.call([*pip, *limits, "uv"], env=env, limit=300)
        self.bed.call(
            [
                *(self.program("uv"), "pip", "install", "-q"),
                *("--python", self.program("python")),
                # Else each start of each program compiles anew.
                "--compile-bytecode",
                *limits,
                *_PACKAGES,
            ],
            env=env,
            limit=900,
        )
        # Not by --system-site-packages, which lets all old libraries in.
        (packages,) = self.venv.glob("lib/python3.*/site-packages")
        for each in _BINDINGS:
            spec = importlib.util.find_spec(each)
            assert spec is not None and spec.origin is not None  # Ceph.missing()
            library = Path(spec.origin)
            (packages / library.name).symlink_to(library)
        self.bed.call([self.program("python"), "-c", f"import {', '.join(_BINDINGS)}"])
        self._stamp.write_text(self._wanted())


class Service(Part):
    """One of them: a database, an API behind uWSGI, and what else it runs."""

    needs_to_prepare = ("mariadb", "services")

    @property
    def port(self) -> int:
        return self.bed.port(self.name)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def where(self) -> str:
        return self.url

    def prepare(self) -> None:
        """Write its files and make its tables; the others can do so meanwhile."""
        if self.running() and self._made.exists():
            return
        if not self._made.exists():
            # What an interrupted start left is of no use.
            self.down()
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        self.write_files()
        if not self._made.exists():
            MariaDB(self.bed).sql(
                "set foreign_key_checks = 0;"
                f"create or replace database {self.name} character set utf8mb3"
            )
            self.make_tables()

    def up(self) -> None:
        self.start()
        if not self._made.exists():
            self.fill()
            self._made.touch()

    # --- what each of them says ----------------------------------------------------

    def write_files(self) -> None:
        """Configuration, and folders."""
        raise NotImplementedError

    def make_tables(self) -> None:
        self.manage("db_sync")

    def start(self) -> None:
        """Start its processes, and wait until they work."""
        raise NotImplementedError

    def fill(self) -> None:
        """What is made through the API, once."""

    # --- help ------------------------------------------------------------------------

    @property
    def _made(self) -> Path:
        return self.folder / "made"

    @property
    def conf(self) -> Path:
        return self.folder / f"{self.name}.conf"

    def write_conf(self, text: str) -> None:
        self.conf.touch(0o600)  # passwords are in it
        self.conf.write_text(text)

    @property
    def database(self) -> str:
        return MariaDB(self.bed).url(self.name)

    def manage(self, *words: str) -> None:
        manage = Services(self.bed).program(f"{self.name}-manage")
        self.bed.call(
            [manage, "--config-file", self.conf, *words], env=QUIET, limit=300
        )

    def serve(
        self,
        process: str,
        environment: Mapping[str, str] | None = None,
        arguments: str = "",
    ) -> None:
        """Its API: one process, a few threads."""
        self.bed.start(
            process,
            [
                Services(self.bed).program("uwsgi"),
                *("--http-socket", f"{LOOPBACK}:{self.port}"),
                *("--module", f"{self.name}.wsgi.api:application", "--need-app"),
                *("--pyargv", arguments),
                *("--threads", "4", "--die-on-term"),
                *("--buffer-size", "65535"),  # of a request's headers: tokens are long
                # Images come in chunks, and may come slowly.
                *("--chunked-input-limit", str(100 << 20)),
                *("--chunked-input-timeout", "120", "--socket-timeout", "120"),
                *("--add-header", "Connection: close"),
            ],
            {**QUIET, **(environment or {})},
            ports=(self.name,),
        )
        # The socket is there before the application, which then answers.
        self.bed.wait(process, lambda: Client(self.port).call("GET", "/"))


class Client:
    """The little of an API's client that a start needs."""

    def __init__(self, port: int, **headers: str) -> None:
        self._port = port
        self._headers = {"Content-Type": "application/json", **headers}

    def call(self, method: str, path: str, body: object = None) -> Any:
        return self.ask(method, path, body)[1]

    def ask(
        self, method: str, path: str, body: object = None
    ) -> tuple[http.client.HTTPMessage, Any]:
        """The answer's headers and its body.

        :raises BedError: the service refuses.
        """
        text = None if body is None else json.dumps(body)
        connecting = http.client.HTTPConnection(LOOPBACK, self._port, timeout=60)
        with contextlib.closing(connecting) as connection:
            connection.request(method, path, text, self._headers)
            answer = connection.getresponse()
            said = answer.read()
        if answer.status >= 400:
            what = said[:300].decode(errors="replace")
            raise BedError(f"{method} {path}: {answer.status} {what}")
        return answer.headers, json.loads(said) if said.strip() else None
