# SPDX-License-Identifier: Apache-2.0
"""MariaDB and PostgreSQL, each with a data folder and a socket of its own."""

from __future__ import annotations

import os
from urllib.parse import quote

from bed.bed import Part

#: A throw-away database need not outlive the machine's power.
_MARIADB = (
    "--skip-networking",
    "--skip-name-resolve",
    "--max-connections=500",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0",
    "--innodb-flush-method=nosync",
    "--innodb-buffer-pool-size=256M",
    "--performance-schema=0",
)
_POSTGRESQL = (
    "listen_addresses=",
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
)


class MariaDB(Part):
    name = "mariadb"
    programs = ("mariadbd", "mariadb", "mariadb-install-db")
    processes = ("mariadb",)

    @property
    def socket(self) -> str:
        return str(self.folder / "sock")

    def up(self) -> None:
        data = self.folder / "data"
        user = f"--user={_me()}"
        if not (self.folder / "made").exists():
            self.folder.mkdir(exist_ok=True)
            self.bed.call(
                [
                    *("mariadb-install-db", "--no-defaults", f"--datadir={data}"),
                    *("--auth-root-authentication-method=normal", "--skip-test-db"),
                    user,
                ]
            )
            (self.folder / "made").touch()
        self.bed.start(
            "mariadb",
            [
                *("mariadbd", "--no-defaults", user, f"--datadir={data}"),
                *(f"--socket={self.socket}", f"--pid-file={self.folder}/mariadbd.pid"),
                *_MARIADB,
            ],
        )
        self.bed.wait("mariadb", lambda: self.sql("select 1"))
        self.sql("create database if not exists imagebackend")

    def sql(self, statement: str) -> str:
        import subprocess

        done = subprocess.run(
            ["mariadb", "--no-defaults", f"-S{self.socket}", "-uroot", "-N"],
            input=statement,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode:
            raise ValueError(done.stderr.strip())
        return done.stdout or "done"

    def url(self, database: str) -> str:
        return f"mysql+pymysql://root@localhost/{database}?unix_socket={self.socket}"

    def where(self) -> str:
        return self.url("imagebackend")

    def env(self) -> dict[str, str]:
        return {"IMAGEBACKEND_MARIADB_URL": self.url("imagebackend")}


class PostgreSQL(Part):
    name = "postgresql"
    processes = ("postgresql",)

    def missing(self) -> list[str]:
        return [] if _postgresql_programs() else ["postgres"]

    def up(self) -> None:
        data = self.folder / "data"
        programs = _postgresql_programs()
        if not (self.folder / "made").exists():
            self.folder.mkdir(exist_ok=True)
            self.bed.call(
                [
                    *_not_root(),
                    *(f"{programs}/initdb", "-D", data, "-U", "root", "-A", "trust"),
                    *("-E", "UTF8", "--no-sync"),
                ]
            )
            (self.folder / "made").touch()
        options = [word for each in _POSTGRESQL for word in ("-c", each)]
        self.bed.start(
            "postgresql",
            [
                *_not_root(),
                *(f"{programs}/postgres", "-D", str(data), "-k", str(self.folder)),
                *options,
            ],
        )
        command = (f"{programs}/psql", "-h", self.folder, "-U", "root", "-At")
        ask = [*command, "-d", "postgres", "-c"]
        listed = "select 1 from pg_database where datname = 'imagebackend'"

        def ready() -> bool:
            return (self.folder / ".s.PGSQL.5432").exists() and bool(
                self.bed.call([f"{programs}/pg_isready", "-h", self.folder])
            )

        self.bed.wait("postgresql", ready)
        if not self.bed.call([*ask, listed]).strip():
            self.bed.call([*ask, "create database imagebackend"])

    def where(self) -> str:
        return (
            f"postgresql+psycopg2://root@/imagebackend?host={quote(str(self.folder))}"
        )

    def env(self) -> dict[str, str]:
        return {"IMAGEBACKEND_POSTGRESQL_URL": self.where()}


def _postgresql_programs() -> str | None:
    from glob import glob

    found = sorted(glob("/usr/lib/postgresql/*/bin/postgres"))
    return os.path.dirname(found[-1]) if found else None


def _not_root() -> list[str]:
    """PostgreSQL refuses to run as root: it gets another number, in a namespace that
    changes nothing else."""
    if os.geteuid() != 0:
        return []
    return ["unshare", "--user", "--map-user=1", "--map-group=1"]


def _me() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
