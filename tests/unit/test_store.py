# SPDX-License-Identifier: Apache-2.0
"""The store: durable rows, one schema, errors that say what to do."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import exc as sa_exc

from imagebackend import exceptions as exc
from imagebackend.model import (
    DiskState,
    GenerationState,
    GiB,
    Lifecycle,
    Role,
)
from imagebackend.store import schema
from imagebackend.store.rows import (
    DiskRow,
    GenerationRow,
    InstanceRow,
    OperationRow,
    OwnerRow,
    Store,
)
from tests.conftest import HostUnderTest


@pytest.fixture
def store(host: HostUnderTest) -> Store:
    return Store(host.conf)


def database(host: HostUnderTest) -> Path:
    return host.path / "store" / "imagebackend.sqlite"


def disk_row(**changes: object) -> DiskRow:
    row = DiskRow(
        id=str(uuid.uuid4()),
        name="root",
        project_id="project",
        host_id="host",
        role=Role.ROOT,
        lifecycle=Lifecycle.EPHEMERAL,
        state=DiskState.READY,
        size=GiB,
        spec={"a": [1, None, "ü"]},
    )
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def generation_row(**changes: object) -> GenerationRow:
    row = GenerationRow(
        id=str(uuid.uuid4()),
        disk_id=None,
        disk_name="root",
        instance_id=None,
        project_id="project",
        host_id="host",
        state=GenerationState.CURRENT,
        backend="qcow2",
        scope="folder:x",
        size=GiB,
        format="qcow2",
        handle={"path": "a/b"},
    )
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


# --- the schema ---------------------------------------------------------------------


def test_the_migrations_make_exactly_the_tables_that_the_code_uses(
    store: Store, host: HostUnderTest
) -> None:
    store.database.upgrade()
    engine = sa.create_engine(f"sqlite:///{database(host)}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


def test_a_newer_schema_is_refused_and_an_older_one_asks_for_an_upgrade(
    store: Store, host: HostUnderTest
) -> None:
    store.database.upgrade()
    store.close()
    for version, advice in (("9999", "upgrade imagebackend"), ("0000", "db upgrade")):
        connection = sqlite3.connect(database(host))
        connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
        connection.commit()
        connection.close()
        with pytest.raises(exc.StoreError, match=advice) as caught, store.reading():
            pass
        assert version in caught.value.message
        assert schema.REVISION in caught.value.message
    connection = sqlite3.connect(database(host))
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(exc.StoreError, match="9999"):
        store.database.upgrade()


def test_the_deployment_has_one_id_whoever_makes_the_store(
    host: HostUnderTest,
) -> None:
    code = (
        "import sys; from tests.unit.test_store import first_use;"
        "print(first_use(sys.argv[1]))"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(host.config_file)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    ids = {child.communicate()[0] for child in children}
    assert all(child.returncode == 0 for child in children)
    assert len(ids) == 1 and len(ids.pop().strip()) == 12


def first_use(config: str) -> str:
    from oslo_config import cfg

    import imagebackend.conf

    conf = cfg.ConfigOpts()
    imagebackend.conf.register(conf)
    conf(["--config-file", config], project="imagebackend")
    with Store(conf).reading() as rows:
        return rows.meta("deployment_id")


def test_the_store_is_private_and_durable(store: Store, host: HostUnderTest) -> None:
    with store.reading() as rows:
        found = [
            rows.connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous")
        ]
    assert found == ["wal", 2]  # 2: FULL
    assert stat.S_IMODE(database(host).parent.stat().st_mode) == 0o700


# --- damage -------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["garbage", "header", "truncated", "page"])
def test_a_damaged_store_is_said_to_be_damaged(
    store: Store, host: HostUnderTest, damage: str
) -> None:
    with store.writing() as tx:
        for _ in range(200):
            tx.insert(disk_row())
    with store.writing() as tx:
        tx.connection.exec_driver_sql("COMMIT")
        tx.connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        tx.connection.exec_driver_sql("BEGIN")
    store.close()
    path = database(host)
    data = bytearray(path.read_bytes())
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    if damage == "garbage":
        data[:] = b"not a database at all" * 1000
    elif damage == "header":
        data[:100] = os.urandom(100)
    elif damage == "truncated":
        del data[len(data) // 2 :]
    else:
        data[4096 * 3 : 4096 * 6] = os.urandom(4096 * 3)
    path.write_bytes(data)
    manager = host.manager()
    try:
        findings = [each.what for each in manager.audit()]
    except exc.StoreError as error:
        assert str(path) in error.message
    else:
        assert any("damage" in what or "page" in what.lower() for what in findings), (
            findings
        )


def test_a_folder_that_cannot_be_written_is_a_host_error(host: HostUnderTest) -> None:
    blocker = host.path / "blocker"
    blocker.write_text("a file where a folder should be")
    host.set("state_path", str(blocker / "state"))
    with pytest.raises(exc.HostError, match="blocker"):
        host.manager().create(host.instance(None))


@pytest.mark.parametrize(
    ("url", "kind", "wanted"),
    [
        ("sqlite://", exc.ConfigError, "memory"),
        ("sqlite:///:memory:", exc.ConfigError, "memory"),
        ("not a url", exc.ConfigError, "SQLAlchemy URL"),
        ("nosuch://user:hunter2@host/x", exc.ConfigError, "nosuch"),
        ("sqlite:////nowhere/at/all/x.sqlite", exc.HostError, "nowhere"),
    ],
)
def test_a_connection_that_cannot_be_is_refused_without_its_password(
    host: HostUnderTest, url: str, kind: type[exc.HostError], wanted: str
) -> None:
    if "nowhere" in url:
        (host.path / "nowhere").write_text("a file")
        url = f"sqlite:///{host.path}/nowhere/x.sqlite"
    host.set("connection", url, "imagebackend_store")
    with pytest.raises(kind, match=wanted) as caught, Store(host.conf).reading():
        pass
    assert "hunter2" not in caught.value.message


def test_a_library_that_is_missing_is_named(host: HostUnderTest) -> None:
    host.set("connection", "mysql+nosuchdriver://u:hunter2@h/x", "imagebackend_store")
    with pytest.raises(exc.HostError) as caught, Store(host.conf).reading():
        pass
    assert "hunter2" not in caught.value.message


# --- rows ---------------------------------------------------------------------------


def test_rows_come_back_as_they_went_in(store: Store) -> None:
    disk = disk_row(operation_id="op", reason="ü\n")
    generation = generation_row(disk_id=disk.id, handle={"deep": {"er": [1, "x"]}})
    with store.writing() as tx:
        tx.insert(disk, generation, InstanceRow("i", "p", "h", "{}", tainted=True))
    with store.reading() as rows:
        assert rows.disk(disk.id) == disk
        assert rows.generation(generation.id) == generation
        instance = rows.instance("i")
    assert instance is not None and instance.tainted is True


@pytest.mark.field("J3")
def test_a_row_that_moved_is_not_changed_from_an_older_view(store: Store) -> None:
    disk, instance = disk_row(), InstanceRow("i", "p", "h", "{}")
    with store.writing() as tx:
        tx.insert(disk, instance)
        newer = tx.update_disk(disk, size=2 * GiB)
        tx.update_instance(instance, tainted=True)
    assert newer.version == disk.version + 1
    with store.writing() as tx:
        with pytest.raises(exc.Superseded, match=disk.id):
            tx.update_disk(disk, size=3 * GiB)
        with pytest.raises(exc.Superseded, match="instance i"):
            tx.update_instance(instance, tainted=False)
        with pytest.raises(exc.Superseded, match="generation gone"):
            tx.update_generation("gone", reason="x")
    with store.reading() as rows:
        found = rows.disk(disk.id)
    assert found is not None and found.size == 2 * GiB


@pytest.mark.field("J3")
def test_a_name_and_a_device_are_one_disks_in_an_instance(store: Store) -> None:
    first = OwnerRow("disk-1", "instance", "root", "virtio", "vda", 0)
    with store.writing() as tx:
        tx.insert(first)
    for changes in ({"name": "other"}, {"device": "vdb"}):
        second = dataclasses.replace(first, disk_id="disk-2", **changes)
        with pytest.raises(sa_exc.IntegrityError), store.writing() as tx:
            tx.insert(second)


def test_a_transaction_that_fails_changes_nothing(store: Store) -> None:
    disk = disk_row()
    with pytest.raises(RuntimeError), store.writing() as tx:
        tx.insert(disk)
        raise RuntimeError
    with store.reading() as rows:
        assert rows.disk(disk.id) is None


def test_a_reader_sees_one_moment(store: Store) -> None:
    disk = disk_row()
    with store.writing() as tx:
        tx.insert(disk)
    with store.reading() as rows:
        assert rows.disk(disk.id) == disk
        with store.writing() as tx:
            tx.update_disk(disk, size=2 * GiB)
        assert rows.disk(disk.id) == disk


def test_a_writer_waits_for_another_as_long_as_the_option_says(
    host: HostUnderTest,
) -> None:
    host.set("busy_timeout", 1, "imagebackend_store")
    store, other = Store(host.conf), Store(host.conf)
    with store.writing() as tx:
        tx.insert(disk_row())
        with pytest.raises(exc.StoreError, match="busy_timeout"), other.writing():
            pass
    held = threading.Event()

    def hold() -> None:
        with store.writing():
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with other.writing() as tx:
        tx.insert(disk_row())
    thread.join()


def test_pages_have_every_row_once(store: Store) -> None:
    rows = [disk_row() for _ in range(1201)]
    with store.writing() as tx:
        tx.insert(*rows)
    pages = list(store.disk_pages())
    assert max(len(page) for page in pages) <= 500
    assert sorted(row.id for page in pages for row in page) == sorted(
        row.id for row in rows
    )


# --- what else can stand in the way -------------------------------------------------


@pytest.mark.parametrize("length", [50, 100, 512, 4095, 4096, 4097, 20000, -4096])
def test_a_store_of_any_length_too_short_is_said_to_be_damaged(
    store: Store, host: HostUnderTest, length: int
) -> None:
    with store.writing() as tx:
        tx.insert(*(disk_row() for _ in range(100)))
    store.close()
    path = database(host)
    os.truncate(path, length if length > 0 else path.stat().st_size + length)
    with pytest.raises(exc.StoreError, match="damaged: restore it") as caught:
        list(Store(host.conf).disk_pages())
    assert str(path) in caught.value.message


@pytest.mark.parametrize("what", ["revision", "upgrade", "damage"])
def test_a_damaged_store_is_a_store_error_whatever_is_asked(
    store: Store, host: HostUnderTest, what: str
) -> None:
    store.database.upgrade()
    database(host).write_bytes(b"x" * 10000)
    with pytest.raises(exc.StoreError, match="damaged"):
        getattr(Store(host.conf).database, what)()


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("disks", "spec", '{"half":'),
        ("disks", "state", "on holiday"),
        ("disks", "role", ""),
        ("generations", "handle", ""),
        ("generations", "state", "\x1b[2J"),
        ("operations", "detail", "x"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(
    store: Store, table: str, column: str, value: str
) -> None:
    disk = disk_row()
    generation = generation_row(disk_id=disk.id)
    operation = OperationRow(str(uuid.uuid4()), "x", "target", "host", "boot", 1, {})
    with store.writing() as tx:
        tx.insert(disk, generation, operation)
        tx.connection.execute(
            sa.text(f"UPDATE {table} SET {column} = :value"), {"value": value}
        )
    with pytest.raises(exc.StoreError) as caught, store.reading() as rows:
        rows.disk(disk.id)
        rows.generation(generation.id)
        rows.operation("target")
    assert table in caught.value.message and column in caught.value.message
    assert caught.value.message.isprintable()
    ids = (disk.id, generation.id, operation.id)
    assert any(each in caught.value.message for each in ids)


def test_an_owner_of_a_disk_that_has_no_row_is_named(store: Store) -> None:
    owner = OwnerRow(str(uuid.uuid4()), "instance", "root", "virtio", "vda", 0)
    with store.writing() as tx:
        tx.insert(owner)
    with pytest.raises(exc.StoreError, match=owner.disk_id), store.reading() as rows:
        rows.owned("instance")


@pytest.mark.parametrize(
    "url",
    [
        "mysql+pymysql://user:hunter2@host:port/x",
        "mysql+pymysql://user:hunter2:more@host:3306:1/x",
        "nosuch://user:hunter2@host/x",
        "nosuch+driver://user:hunter2@host/x",
        "mysql+nosuch://user:hunter2@host/x",
        "hunter2",
        "://hunter2",
    ],
)
@pytest.mark.parametrize("what", ["revision", "upgrade", "reading"])
def test_no_message_about_a_connection_has_its_password(
    host: HostUnderTest, url: str, what: str
) -> None:
    host.set("connection", url, "imagebackend_store")
    with pytest.raises(exc.HostError) as caught:
        if what == "reading":
            with Store(host.conf).reading():
                pass
        else:
            getattr(Store(host.conf).database, what)()
    assert caught.value.code in ("config", "missing-dependency")
    # The traceback that --debug prints shows all of these.
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+pysqlite://"),
        "sqlite:///file::memory:?uri=true",
        "sqlite:///file:x?mode=memory&cache=shared&uri=true",
    ],
)
@pytest.mark.parametrize("what", ["revision", "upgrade", "damage"])
def test_a_store_in_memory_is_refused_whatever_is_asked(
    host: HostUnderTest, url: str, what: str
) -> None:
    host.set("connection", url, "imagebackend_store")
    with pytest.raises(exc.ConfigError, match="path of a file"):
        getattr(Store(host.conf).database, what)()


def test_a_relative_path_is_one_file_wherever_the_process_goes(
    host: HostUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    host.set("connection", "sqlite:///rows.sqlite", "imagebackend_store")
    store = Store(host.conf)
    with store.writing() as tx:
        tx.insert(disk_row())
    store.close()
    assert (tmp_path / "rows.sqlite").is_file()


def test_a_server_that_does_not_answer_is_a_store_error(host: HostUnderTest) -> None:
    url = "mysql+pymysql://user:hunter2@127.0.0.1:1/x"
    host.set("connection", url, "imagebackend_store")
    with pytest.raises(exc.StoreError) as caught, Store(host.conf).reading():
        pass
    assert "hunter2" not in caught.value.message


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_another_users_store_is_not_for_this_one(
    host: HostUnderTest, mode: int
) -> None:
    # pytest's own folders are not for others to enter.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "store" / "rows.sqlite"
        host.set("connection", f"sqlite:///{path}", "imagebackend_store")
        store = Store(host.conf)
        store.database.upgrade()
        store.close()
        path.parent.chmod(mode)
        _other_user_cannot_write(path)


def _other_user_cannot_write(path: Path) -> None:
    code = (
        "import sys; from imagebackend import exceptions as exc\n"
        "from imagebackend.store.db import Database\n"
        "from oslo_config import cfg; import imagebackend.conf\n"
        "conf = cfg.ConfigOpts(); imagebackend.conf.register(conf)\n"
        "conf([], project='imagebackend', default_config_files=[])\n"
        "url = 'sqlite:///' + sys.argv[1]\n"
        "conf.set_override('connection', url, 'imagebackend_store')\n"
        "database = Database(conf)\n"
        "import os; os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    with database.writing(): pass\n"
        "except exc.HostError as error: print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout
    assert "cannot be opened for writing by this user" in done.stdout


def test_an_upgrade_that_dies_half_way_is_finished_by_the_next(
    host: HostUnderTest,
) -> None:
    code = (
        "import os, sys; from oslo_config import cfg; import imagebackend.conf\n"
        "from imagebackend.store.rows import Store; from alembic import op\n"
        "conf = cfg.ConfigOpts(); imagebackend.conf.register(conf)\n"
        "conf(['--config-file', sys.argv[1]], project='imagebackend')\n"
        "real = op.create_table\n"
        "def create_table(name, *columns):\n"
        "    if name == 'owners': os.kill(os.getpid(), 9)\n"
        "    return real(name, *columns)\n"
        "op.create_table = create_table\n"
        "Store(conf).database.upgrade()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(host.config_file)])
    assert done.returncode == -9 and database(host).exists()
    store = Store(host.conf)
    assert store.database.revision() is None
    with store.writing() as tx:
        tx.insert(disk_row())
        assert tx.meta("deployment_id")
    assert store.database.damage() == ""


def test_more_threads_than_a_pool_has_wait_for_nobody(store: Store) -> None:
    threads = 40
    together = threading.Barrier(threads)
    seen: list[str] = []

    def read() -> None:
        with store.reading() as rows:
            together.wait(timeout=20)
            seen.append(rows.meta("deployment_id"))

    workers = [threading.Thread(target=read) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(seen) == threads and len(set(seen)) == 1


def test_the_deployment_id_outlives_upgrades_and_restarts(
    host: HostUnderTest,
) -> None:
    found = set()
    for _ in range(3):
        store = Store(host.conf)
        store.database.upgrade()
        with store.reading() as rows:
            found.add(rows.meta("deployment_id"))
        store.close()
    assert len(found) == 1


def test_a_thousand_disks_take_a_page_of_memory(store: Store) -> None:
    with store.writing() as tx:
        tx.insert(*(disk_row() for _ in range(1100)))
        tx.insert(*(generation_row() for _ in range(600)))
    pages = store.disk_pages()
    first = next(pages)
    assert len(first) == 500
    # Rows that go while somebody reads are no reason to stop, or to come twice.
    with store.writing() as tx:
        tx.delete(*first[:250])
    rest = [row.id for page in pages for row in page]
    assert len(rest) == len(set(rest)) == 600
    assert not set(rest) & {row.id for row in first}
    assert sum(len(page) for page in store.generation_pages()) == 600


def test_a_store_on_a_network_file_system_is_refused(
    host: HostUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagebackend.store.db.file_system", lambda path: "nfs4")
    with pytest.raises(exc.ConfigError, match="nfs4"), Store(host.conf).reading():
        pass
    assert not database(host).exists()
