# SPDX-License-Identifier: Apache-2.0
"""The store on MariaDB and PostgreSQL: the same tests as on SQLite, and what only a
server can do: be shared by hosts, and go away."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from imagebackend import exceptions as exc
from imagebackend.model import GiB, Severity
from imagebackend.store import schema
from imagebackend.store.rows import Store
from tests.conftest import HostUnderTest
from tests.unit.test_operations import (
    Bench,
    bench,
    test_a_block_that_fails_is_settled_and_the_target_is_free,
    test_a_second_operation_on_a_target_is_told_who_holds_it,
    test_a_sweep_removes_what_has_no_owner_and_nothing_else,
    test_an_orphaned_child_counts_as_alive,
    test_another_processes_operation_counts_until_it_is_dead,
    test_nothing_is_left_of_operations_that_ended,
    test_threads_never_hold_one_target_together,
    test_verbs_at_once_on_one_instance_leave_what_one_of_them_promised,
    test_what_cannot_be_settled_yet_keeps_the_target,
)
from tests.unit.test_store import (
    disk_row,
    test_a_name_and_a_device_are_one_disks_in_an_instance,
    test_a_reader_sees_one_moment,
    test_a_row_that_cannot_be_read_is_named,
    test_a_row_that_moved_is_not_changed_from_an_older_view,
    test_a_transaction_that_fails_changes_nothing,
    test_an_owner_of_a_disk_that_has_no_row_is_named,
    test_pages_have_every_row_once,
    test_rows_come_back_as_they_went_in,
)

__all__ = [
    "Bench",
    "bench",
    "test_a_block_that_fails_is_settled_and_the_target_is_free",
    "test_a_name_and_a_device_are_one_disks_in_an_instance",
    "test_a_reader_sees_one_moment",
    "test_a_row_that_cannot_be_read_is_named",
    "test_a_row_that_moved_is_not_changed_from_an_older_view",
    "test_a_second_operation_on_a_target_is_told_who_holds_it",
    "test_a_sweep_removes_what_has_no_owner_and_nothing_else",
    "test_a_transaction_that_fails_changes_nothing",
    "test_an_orphaned_child_counts_as_alive",
    "test_an_owner_of_a_disk_that_has_no_row_is_named",
    "test_another_processes_operation_counts_until_it_is_dead",
    "test_nothing_is_left_of_operations_that_ended",
    "test_pages_have_every_row_once",
    "test_rows_come_back_as_they_went_in",
    "test_threads_never_hold_one_target_together",
    "test_verbs_at_once_on_one_instance_leave_what_one_of_them_promised",
    "test_what_cannot_be_settled_yet_keeps_the_target",
]


@pytest.fixture(params=["MARIADB", "POSTGRESQL"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A new database on a real server."""
    server = os.environ.get(f"IMAGEBACKEND_{request.param}_URL")
    if not server:
        if "IMAGEBACKEND_TESTBED" in os.environ:
            pytest.fail(f"the test bed runs without {request.param}")
        pytest.skip("no database: tools/testbed run COMMAND brings one up")
    name = f"test_{uuid.uuid4().hex}"
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield sa.make_url(server).set(database=name).render_as_string(hide_password=False)
    with engine.connect() as connection:
        force = " WITH (FORCE)" if request.param == "POSTGRESQL" else ""
        connection.exec_driver_sql(f"DROP DATABASE {name}{force}")
    engine.dispose()


@pytest.fixture
def make_host(
    make_host: Callable[[str], HostUnderTest], url: str
) -> Callable[[str], HostUnderTest]:
    """Hosts that share one store."""

    def make(name: str) -> HostUnderTest:
        host = make_host(name)
        with host.config_file.open("a") as file:
            file.write(f"[imagebackend_store]\nconnection = {url.replace('$', '$$')}\n")
        host.conf.reload_config_files()
        Store(host.conf).database.upgrade()
        return host

    return make


@pytest.fixture
def store(host: HostUnderTest) -> Iterator[Store]:
    store = Store(host.conf)
    yield store
    store.close()


def test_an_empty_database_asks_for_the_upgrade_and_twice_does_no_harm(
    host: HostUnderTest, url: str
) -> None:
    engine = sa.create_engine(url)
    schema.metadata.drop_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE alembic_version")
    fresh = Store(host.conf)
    with pytest.raises(exc.StoreError, match="db upgrade"), fresh.reading():
        pass
    assert fresh.database.upgrade() is None
    assert fresh.database.upgrade() == schema.REVISION
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()
    fresh.close()


def test_hosts_with_one_store_see_each_others_disks_and_leave_them(
    make_host: Callable[[str], HostUnderTest],
) -> None:
    one, two = make_host("one"), make_host("two")
    managers = [each.manager() for each in (one, two)]
    assert managers[0].host_id != managers[1].host_id
    for host in (one, two):
        host.raw_image()
    first, second = one.instance(), two.instance()
    managers[0].create(first)
    managers[1].create(second)
    assert {each.instance_id for each in managers[0].list()} == {first.id, second.id}
    for manager in managers:
        found = [each for each in manager.audit() if each.severity is Severity.ERROR]
        assert found == []
    managers[0].destroy(first.id)
    assert [each.instance_id for each in managers[1].list()] == [second.id]
    managers[1].destroy(second.id)


@pytest.mark.field("J3")
def test_of_many_who_change_one_row_at_once_one_wins_each_round(store: Store) -> None:
    disk = disk_row()
    with store.writing() as tx:
        tx.insert(disk)
    rounds, threads = 20, 6
    won: list[int] = []
    barrier = threading.Barrier(threads)

    def work(number: int) -> None:
        for turn in range(rounds):
            with store.reading() as rows:
                row = rows.disk(disk.id)
            assert row is not None
            barrier.wait()
            try:
                with store.writing() as tx:
                    tx.update_disk(row, size=(turn * threads + number + 1) * GiB)
                won.append(turn)
            except exc.Superseded:
                pass
            barrier.wait()

    workers = [threading.Thread(target=work, args=(each,)) for each in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert sorted(won) == list(range(rounds))
    with store.reading() as rows:
        row = rows.disk(disk.id)
    assert row is not None and row.version == disk.version + rounds


def test_many_threads_make_remake_and_delete_disks_at_once(
    host: HostUnderTest,
) -> None:
    host.raw_image()
    manager = host.manager()
    kept = [host.instance(swap_mb=1) for _ in range(24)]
    gone = [host.instance(swap_mb=1) for _ in range(24)]
    queue, errors = [*kept, *gone], []

    def work() -> None:
        while queue:
            try:
                instance = queue.pop()
                manager.create(instance)
                manager.rebuild(instance)
                if instance in gone:
                    manager.destroy(instance.id)
            except IndexError:
                return
            except BaseException as error:
                errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert errors == []
    assert len(list(manager.list())) == 48
    assert [each for each in manager.audit() if each.severity is not Severity.OK] == []


def test_a_connection_that_the_server_ended_is_made_anew(
    store: Store, url: str
) -> None:
    with store.writing() as tx:
        tx.insert(disk_row())
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        else:
            mine = connection.exec_driver_sql("SELECT connection_id()").scalar()
            for row in connection.exec_driver_sql("SHOW PROCESSLIST").all():
                if row.Id != mine and row.db == sa.make_url(url).database:
                    connection.exec_driver_sql(f"KILL {row.Id}")
    engine.dispose()
    assert sum(len(page) for page in store.disk_pages()) == 1
