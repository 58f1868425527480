# SPDX-License-Identifier: Apache-2.0
"""The database: connection, durability, schema version, translation of errors."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from sqlalchemy import event
from sqlalchemy import exc as sa_exc

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.local_files import NETWORK_FILE_SYSTEMS, file_system
from imagebackend.store import schema

_SQLITE_FILE = "imagebackend.sqlite"
_VERSION = sa.text("SELECT version_num FROM alembic_version")


class Database:
    """Opens when first used, then stays open; thread safe."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf
        self._lock = threading.Lock()
        self._engine: sa.Engine | None = None

    @property
    def url(self) -> sa.URL:
        configured = self._conf.imagebackend_store.connection
        if not configured:
            state = self._conf.imagebackend.state_path
            path = os.path.abspath(os.path.join(state, "store", _SQLITE_FILE))
            return sa.URL.create("sqlite", database=path)
        try:
            url = sa.make_url(configured)
        except (sa_exc.ArgumentError, ValueError):
            # Their messages may quote the password.
            raise exc.ConfigError(
                "[imagebackend_store] connection is not an SQLAlchemy URL, as "
                "mysql+pymysql://user:password@host/name"
            ) from None
        if url.get_backend_name() != "sqlite":
            return url
        name = url.database or ":memory:"
        if name.startswith((":memory:", "file:")):
            raise exc.ConfigError(
                f"[imagebackend_store] connection names the SQLite database {name!r}: "
                f"it must be the path of a file, or crashes lose what disks there are"
            )
        return url.set(database=os.path.abspath(name))

    @property
    def shared(self) -> bool:
        """Whether other hosts can use the same rows."""
        return self.url.get_backend_name() != "sqlite"

    @property
    def name(self) -> str:
        """For messages: no password."""
        url = self.url
        if url.get_backend_name() == "sqlite":
            return str(url.database)
        return url.render_as_string(hide_password=True)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """One consistent view."""
        with self._errors():
            engine = self._open()
            if engine.dialect.name == "postgresql":
                # Its default shows each statement another moment.
                engine = engine.execution_options(isolation_level="REPEATABLE READ")
            with engine.connect() as connection:
                if connection.dialect.name == "sqlite":
                    connection.exec_driver_sql("BEGIN")
                yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction, durable when the block has ended."""
        with (
            self._errors(),
            self._open().connect() as connection,
            connection.begin(),
        ):
            if connection.dialect.name == "sqlite":
                # Take the write lock now: a reader that becomes a writer later may
                # be refused however long it waits.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    def close(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
                self._engine = None

    # --- schema --------------------------------------------------------------

    def upgrade(self) -> str | None:
        """Bring the schema up to date; returns the revision before, None if new."""
        if not self.shared:
            self._make_file()
        with self._errors(), self._connected() as engine:
            before = self._version(engine)
            self._refuse_newer(before)
            _run_migrations(engine)
            self._seed(engine)
        return before

    def revision(self) -> str | None:
        """The schema's revision; None if there is no schema yet.

        :raises StoreError: the database does not answer, or is damaged.
        """
        if not self.shared and not os.path.exists(str(self.url.database)):
            return None
        with self._errors(), self._connected() as engine:
            return self._version(engine)

    def damage(self) -> str:
        """What SQLite's own check finds wrong; empty if nothing, or not SQLite."""
        if self.shared:
            return ""
        with self.reading() as connection:
            rows = connection.exec_driver_sql("PRAGMA quick_check(5)").all()
        answers = [str(row[0]) for row in rows]
        return "" if answers == ["ok"] else "; ".join(answers)

    def _open(self) -> sa.Engine:
        engine = self._engine
        if engine is not None:
            return engine
        with self._lock:
            if self._engine is None:
                self._engine = self._checked()
            return self._engine

    def _checked(self) -> sa.Engine:
        if not self.shared:
            self._refuse_network()
            if self._make_file():
                self.upgrade()
        with contextlib.ExitStack() as undo:
            engine = self._connect()
            undo.callback(engine.dispose)
            version = self._version(engine)
            if version is None and not self.shared:
                # Another process is making it, or died while it did.
                self.upgrade()
                version = self._version(engine)
            self._refuse_newer(version)
            if version != schema.REVISION:
                raise exc.StoreError(
                    f"the store {self.name} has schema {version or 'none'}, this "
                    f"version works with {schema.REVISION}: run `imagebackend db "
                    f"upgrade`",
                    store=self.name,
                    found=version,
                    wanted=schema.REVISION,
                )
            undo.pop_all()
        return engine

    def _refuse_network(self) -> None:
        """:raises ConfigError: SQLite's locks and WAL do not work there."""
        kind = file_system(os.path.dirname(str(self.url.database)))
        if kind in NETWORK_FILE_SYSTEMS:
            raise exc.ConfigError(
                f"the store {self.name} is on a network file system ({kind}), where "
                f"SQLite loses rows: use a local one, or let [imagebackend_store] "
                f"connection name MariaDB or PostgreSQL",
                store=self.name,
                file_system=kind,
            )

    def _make_file(self) -> bool:
        path = str(self.url.database)
        if os.path.exists(path):
            return False
        try:
            if not self._conf.imagebackend_store.connection:
                state = self._conf.imagebackend.state_path
                os.makedirs(state, mode=0o711, exist_ok=True)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        except OSError as error:
            raise processes.space_error(error, path) from error
        return True

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sa.Engine]:
        """An engine for the block."""
        engine = self._connect()
        try:
            yield engine
        finally:
            engine.dispose()

    def _connect(self) -> sa.Engine:
        url = self.url
        if url.get_backend_name() != "sqlite":
            return sa.create_engine(url, pool_pre_ping=True, max_overflow=-1)
        if not self._conf.imagebackend_store.connection:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(os.path.dirname(str(url.database)), 0o700)
        engine = sa.create_engine(
            url,
            connect_args={
                "timeout": self._conf.imagebackend_store.busy_timeout,
                # The driver must not begin transactions by itself: `writing` does.
                "isolation_level": None,
                "check_same_thread": False,
            },
            # A thread waits for the database, never for another one's connection.
            max_overflow=-1,
        )
        event.listen(engine, "connect", _sqlite_durable)
        return engine

    def _version(self, engine: sa.Engine) -> str | None:
        with engine.connect() as connection:
            if not sa.inspect(connection).has_table("alembic_version"):
                return None
            found = connection.execute(_VERSION).scalar()
        return None if found is None else str(found)

    def _refuse_newer(self, version: str | None) -> None:
        if version is not None and version > schema.REVISION:
            raise exc.StoreError(
                f"the store {self.name} has schema {version}, newer than this "
                f"version's {schema.REVISION}: upgrade imagebackend on this host",
                store=self.name,
                found=version,
                wanted=schema.REVISION,
            )

    def _seed(self, engine: sa.Engine) -> None:
        # Short, since it is part of every object's name; 48 random bits tell the
        # deployments that share a storage apart.
        row = {"key": "deployment_id", "value": secrets.token_hex(6)}
        with contextlib.suppress(sa_exc.IntegrityError), engine.begin() as connection:
            connection.execute(sa.insert(schema.meta).values(row))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Only our exceptions leave; a violated constraint is the caller's to read."""
        try:
            yield
        except sa_exc.IntegrityError:
            raise
        except sa_exc.DBAPIError as error:
            raise self._translate(error) from error
        except sa_exc.NoSuchModuleError as error:
            raise exc.ConfigError(
                f"[imagebackend_store] connection: SQLAlchemy knows no database "
                f"{self.url.drivername!r}; it knows sqlite, mysql+pymysql, "
                f"postgresql+psycopg and others"
            ) from error
        except sa_exc.ArgumentError as error:
            raise exc.ConfigError(
                f"[imagebackend_store] connection: {error}"
            ) from error
        except ModuleNotFoundError as error:
            raise exc.MissingDependency(
                f"the store {self.name} needs the Python library {error.name}",
                library=error.name,
            ) from error

    def _translate(self, error: sa_exc.DBAPIError) -> exc.ImageBackendError:
        reason = str(error.orig)
        if any(each in reason for each in ("malformed", "not a database", "decode")):
            what = "is damaged: restore it from a backup; the disks are untouched"
        elif _contended(error):
            return exc.StoreContended(
                f"the store {self.name}: another transaction stood in the way "
                f"({reason}): try again",
                store=self.name,
                reason=reason,
            )
        elif "locked" in reason:
            what = (
                "was held by another process for longer than [imagebackend_store] "
                "busy_timeout"
            )
        elif "readonly" in reason or "unable to open" in reason:
            what = "cannot be opened for writing by this user"
        elif "full" in reason or "disk I/O" in reason:
            what = "cannot be written: is its file system full?"
        else:
            what = "failed"
        return exc.StoreError(
            f"the store {self.name} {what} ({reason})", store=self.name, reason=reason
        )


def _contended(error: sa_exc.DBAPIError) -> bool:
    """Whether the server gave one of two transactions up for the other's sake."""
    if getattr(error.orig, "pgcode", None) in ("40001", "40P01"):
        return True
    arguments: tuple[object, ...] = getattr(error.orig, "args", ())
    # Deadlock, lock wait timeout, and a row that changed since it was read.
    return bool(arguments) and arguments[0] in (1213, 1205, 1020)


def _sqlite_durable(connection: sqlite3.Connection, _record: Any) -> None:
    """WAL with synchronous=FULL: a commit is on the disk when it returns."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _run_migrations(engine: sa.Engine) -> None:
    # Alembic is needed only here, and costs as much as the rest together.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", "imagebackend.store:migrations")
    with engine.connect() as connection, connection.begin():
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise exc.StoreError(f"the store cannot be upgraded: {error}") from error
