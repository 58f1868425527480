# SPDX-License-Identifier: Apache-2.0
"""Operations: one at a time on a target, and dead ones are told from live ones."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebackend import exceptions as exc
from imagebackend.host import Host
from imagebackend.model import UploadTarget
from imagebackend.store.operations import Operation, Operations
from imagebackend.store.rows import Store
from tests.conftest import HostUnderTest


@dataclasses.dataclass
class Bench:
    host: HostUnderTest
    store: Store
    operations: Operations
    settled: list[str]

    def settle(self, operation: Operation) -> None:
        self.settled.append(operation.id)
        with self.store.writing() as tx:
            operation.finish(tx)

    def finish(self, operation: Operation) -> None:
        with self.store.writing() as tx:
            operation.finish(tx)


@pytest.fixture
def bench(host: HostUnderTest) -> Bench:
    store = Store(host.conf)
    return Bench(host, store, Operations(store, Host(host.conf)), [])


#: A process that begins an operation and then does as it is told.
CHILD = """
import os, subprocess, sys, time
from oslo_config import cfg
import imagebackend.conf
from imagebackend.host import Host
from imagebackend import processes
from imagebackend.store.operations import Operations
from imagebackend.store.rows import Store
conf = cfg.ConfigOpts(); imagebackend.conf.register(conf)
conf(["--config-file", sys.argv[1]], project="imagebackend")
store = Store(conf)
with Operations(store, Host(conf)).begin("create", sys.argv[2], lambda op: None) as op:
    op.workdir()
    if sys.argv[3] == "child":
        subprocess.Popen(["sleep", sys.argv[4]], pass_fds=(op.fd,))
    print("held", flush=True)
    time.sleep(60)
"""


def hold(bench: Bench, target: str, *how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(bench.host.config_file), target, *how],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


@pytest.mark.field("J3")
def test_a_second_operation_on_a_target_is_told_who_holds_it(bench: Bench) -> None:
    with bench.operations.begin("create", "target", bench.settle) as operation:
        with (
            pytest.raises(exc.Busy) as caught,
            bench.operations.begin("destroy", "target", bench.settle),
        ):
            pass
        for word in ("destroy", "target", "create", str(os.getpid())):
            assert word in caught.value.message
        with bench.operations.begin("create", "other", bench.settle) as other:
            bench.finish(other)
        bench.finish(operation)
    assert bench.settled == []


@pytest.mark.field("J3")
def test_another_processes_operation_counts_until_it_is_dead(bench: Bench) -> None:
    holder = hold(bench, "target", "nothing")
    with (
        pytest.raises(exc.Busy, match=str(holder.pid)),
        bench.operations.begin("destroy", "target", bench.settle),
    ):
        pass
    holder.kill()
    holder.wait()
    with bench.operations.begin("destroy", "target", bench.settle) as operation:
        assert len(bench.settled) == 1
        bench.finish(operation)
    assert bench.host.files("locks") == [] and bench.host.files("tmp") == []


def test_an_orphaned_child_counts_as_alive(bench: Bench) -> None:
    holder = hold(bench, "target", "child", "1.5")
    holder.kill()
    holder.wait()
    with (
        pytest.raises(exc.Busy),
        bench.operations.begin("destroy", "target", bench.settle),
    ):
        pass
    deadline = time.monotonic() + 10
    while True:
        try:
            with bench.operations.begin("destroy", "target", bench.settle) as operation:
                bench.finish(operation)
            break
        except exc.Busy:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert len(bench.settled) == 1


def test_another_hosts_operation_is_never_taken_over(
    bench: Bench, make_host: Callable[[str], HostUnderTest]
) -> None:
    url = f"sqlite:///{bench.host.path}/shared.sqlite"
    elsewhere = make_host("elsewhere")
    for each in (bench.host, elsewhere):
        each.set("connection", url, "imagebackend_store")
    theirs = Operations(Store(elsewhere.conf), Host(elsewhere.conf))
    here = Operations(Store(bench.host.conf), Host(bench.host.conf))
    context = theirs.begin("create", "target", bench.settle)
    operation = context.__enter__()
    assert here.alive(operation.row) is None
    assert here.take_over(operation.row) is None
    operation.close()  # it died
    with pytest.raises(exc.Busy), here.begin("destroy", "target", bench.settle):
        pass
    assert here.take_over(operation.row) is None and bench.settled == []


def test_a_block_that_fails_is_settled_and_the_target_is_free(bench: Bench) -> None:
    with (
        pytest.raises(RuntimeError, match="boom"),
        bench.operations.begin("create", "target", bench.settle),
    ):
        raise RuntimeError("boom")
    assert len(bench.settled) == 1
    with bench.operations.begin("create", "target", bench.settle) as operation:
        bench.finish(operation)


def test_what_cannot_be_settled_yet_keeps_the_target(bench: Bench) -> None:
    with (
        pytest.raises(RuntimeError),
        bench.operations.begin("create", "target", lambda operation: None),
    ):
        raise RuntimeError
    with (
        pytest.raises(exc.Busy, match="imagebackend recover"),
        bench.operations.begin("destroy", "target", lambda operation: None),
    ):
        pass
    with bench.operations.begin("destroy", "target", bench.settle) as operation:
        bench.finish(operation)


@pytest.mark.field("C12")
def test_nothing_is_left_of_operations_that_ended(bench: Bench) -> None:
    for _ in range(300):
        with bench.operations.begin("create", "target", bench.settle) as operation:
            operation.workdir()
            bench.finish(operation)
    for folder in ("locks", "tmp"):
        assert os.listdir(bench.host.path / folder) == []


def test_a_sweep_removes_what_has_no_owner_and_nothing_else(bench: Bench) -> None:
    dead = str(uuid.uuid4())
    locks, tmp = bench.host.path / "locks", bench.host.path / "tmp"
    with bench.operations.begin("create", "target", bench.settle) as operation:
        operation.workdir()
        (locks / f"{dead}.lock").touch()
        (tmp / dead).mkdir()
        (tmp / dead / "file").touch()
        assert bench.operations.sweep() == [dead]
        assert os.listdir(tmp) == [operation.id]
        assert bench.operations.alive(operation.row) is True
        bench.finish(operation)


@pytest.mark.field("J3")
def test_threads_never_hold_one_target_together(bench: Bench) -> None:
    inside: list[str] = []
    most: list[int] = []
    busy: list[exc.Busy] = []

    def work(name: str) -> None:
        for _ in range(10):
            try:
                with bench.operations.begin("x", "target", bench.settle) as operation:
                    inside.append(name)
                    most.append(len(inside))
                    inside.remove(name)
                    bench.finish(operation)
            except exc.Busy as error:
                busy.append(error)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1} and len(most) + len(busy) == 80


# --- the host -----------------------------------------------------------------------


def test_many_processes_agree_on_the_hosts_id(host: HostUnderTest) -> None:
    code = (
        "import sys; from oslo_config import cfg; import imagebackend.conf;"
        "from imagebackend.host import Host; c = cfg.ConfigOpts();"
        "imagebackend.conf.register(c); c(['--config-file', sys.argv[1]]);"
        "print(Host(c).id)"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(host.config_file)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    ids = {child.communicate()[0].strip() for child in children}
    assert ids == {Host(host.conf).id}
    assert [name for name in os.listdir(host.path) if "host-id" in name] == ["host-id"]


def test_a_host_id_that_is_none_is_refused_rather_than_replaced(
    host: HostUnderTest,
) -> None:
    (host.path / "host-id").write_text("my-host\n")
    with pytest.raises(exc.HostError, match="my-host"):
        _ = Host(host.conf).id
    assert Path(host.path / "host-id").read_text() == "my-host\n"


def test_the_first_error_is_what_the_caller_hears(bench: Bench) -> None:
    def settle(operation: Operation) -> None:
        raise exc.StorageUnavailable("the storage is down")

    with (
        pytest.raises(exc.NoSpace, match="full") as caught,
        bench.operations.begin("create", "target", settle),
    ):
        raise exc.NoSpace("full")
    assert "the storage is down" in " ".join(caught.value.__notes__)
    with bench.store.reading() as rows:
        row = rows.operation("target")
    assert row is not None and bench.operations.alive(row) is False
    with bench.operations.begin("destroy", "target", bench.settle) as operation:
        assert bench.settled == [row.id]
        bench.finish(operation)


def test_whoever_looks_is_not_taken_for_the_owner(bench: Bench) -> None:
    holder = hold(bench, "target", "nothing")
    holder.kill()
    holder.wait()
    with bench.store.reading() as rows:
        row = rows.operation("target")
    assert row is not None
    with (bench.host.path / "locks" / f"{row.id}.lock").open() as another:
        fcntl.flock(another, fcntl.LOCK_SH)  # as somebody else who looks, just now
        assert bench.operations.alive(row) is False
    bench.finish(Operation(row, Host(bench.host.conf), -1))
    assert bench.operations.sweep() == [row.id]
    assert bench.operations.alive(row) is False
    assert bench.host.files("locks") == []  # looking makes no files


def test_an_operation_that_a_signal_ends_is_settled(bench: Bench) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        bench.operations.begin("create", "target", bench.settle),
    ):
        raise KeyboardInterrupt
    assert len(bench.settled) == 1
    assert bench.host.files("locks") == [] and bench.host.files("tmp") == []


def test_a_child_holds_the_lock_of_its_own_operation_only(bench: Bench) -> None:
    from imagebackend import processes

    with bench.operations.begin("create", "one", bench.settle) as outer:
        with bench.operations.begin("create", "two", bench.settle) as inner:
            done = processes.run(
                ["sh", "-c", "ls -l /proc/$$/fd"], timeout=10, package="x"
            )
            for operation in (outer, inner):
                assert f"{operation.id}.lock" in done.stdout
            bench.finish(inner)
        done = processes.run(["sh", "-c", "ls -l /proc/$$/fd"], timeout=10, package="x")
        assert f"{outer.id}.lock" in done.stdout and inner.id not in done.stdout
        bench.finish(outer)
    done = processes.run(["sh", "-c", "ls -l /proc/$$/fd"], timeout=10, package="x")
    assert ".lock" not in done.stdout


@pytest.mark.field("J3")
def test_verbs_at_once_on_one_instance_leave_what_one_of_them_promised(
    host: HostUnderTest,
) -> None:
    """Snapshot beside resize, delete beside delete, connect beside connect."""
    host.raw_image()
    manager = host.manager()
    instance = host.instance(root_gb=1)
    manager.create(instance)
    assert instance.flavor
    bigger = dataclasses.replace(
        instance, flavor=dataclasses.replace(instance.flavor, root_gb=2)
    )
    errors: list[exc.ImageBackendError] = []
    done: list[str] = []

    def at_once(*verbs: Callable[[], object]) -> None:
        start = threading.Barrier(len(verbs))

        def work(verb: Callable[[], object]) -> None:
            start.wait()
            try:
                verb()
                done.append("x")
            except exc.ImageBackendError as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(verb,)) for verb in verbs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    at_once(
        *(lambda: manager.connect(instance.id),) * 4,
        *(lambda: manager.disconnect(instance.id),) * 4,
    )
    manager.disconnect(instance.id)
    at_once(
        lambda: manager.resize(bigger),
        lambda: manager.rebuild(instance),
        lambda: manager.snapshot(instance.id, UploadTarget("snap")),
        lambda: manager.resize(bigger),
    )
    assert done and all(isinstance(each, exc.Busy | exc.Conflict) for each in errors), (
        errors
    )
    (disk,) = manager.list(instance.id)
    assert disk.state == "ready" and not disk.operation and not disk.connected
    errors.clear()
    at_once(*(lambda: manager.destroy(instance.id),) * 8)
    assert all(isinstance(each, exc.Busy) for each in errors), errors
    assert list(manager.list(instance.id)) == [] and host.files() == []
    assert host.files("locks") == [] and host.files("tmp") == []


@pytest.mark.field("J3")
def test_who_waits_is_told_how_long_it_has_been(bench: Bench) -> None:
    with bench.operations.begin("create", "target", bench.settle) as operation:
        with bench.store.writing() as tx:
            tx.connection.exec_driver_sql(
                f"UPDATE operations SET started_at = {time.time() - 100}"
            )
        with (
            pytest.raises(exc.Busy, match=r"has held it for 10[0-5] s") as caught,
            bench.operations.begin("destroy", "target", bench.settle),
        ):
            pass
        assert caught.value.values["operation"] == operation.id
        assert caught.value.values["verb"] == "create"
        bench.finish(operation)
