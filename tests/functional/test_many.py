# SPDX-License-Identifier: Apache-2.0
"""Many processes and threads on one host at once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from imagebackend import Change, DiskManager, DiskSpec, Instance
from imagebackend import exceptions as exc
from imagebackend.model import Severity
from tests.conftest import HostUnderTest, MiB

PROCESSES = 10
_IN_OPEN = 0x20


def run_all(
    host: HostUnderTest, verb: str, work: Sequence[Sequence[str]]
) -> list[list[str]]:
    """One process for each list of instances, begun together; what they printed."""
    children = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.functional.many_worker"),
                *(str(host.config_file), verb, *instances),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for instances in work
    ]
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = [child.communicate()[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0] * len(children)
    return outputs


@contextmanager
def opens_counted(path: Path) -> Iterator[list[int]]:
    """How often anybody opened the file in the block, told by the kernel."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    libc.inotify_add_watch(fd, os.fsencode(path), _IN_OPEN)
    counted = [0]
    try:
        yield counted
        # A watch on one file: each event is a header without a name.
        counted[0] = len(os.read(fd, 1 << 16)) // 16
    finally:
        os.close(fd)


def all_right(manager: DiskManager) -> None:
    wrong = [each for each in manager.audit() if each.severity is not Severity.OK]
    assert wrong == []


@pytest.mark.field("C2")
def test_fifty_creates_of_one_uncached_image_from_ten_processes_fetch_it_once(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image(size=16 * MiB)
    work = [[str(uuid.uuid4()) for _ in range(5)] for _ in range(PROCESSES)]
    with opens_counted(host.images / "raw-image.raw") as opens:
        outputs = run_all(host, "create", work)
    assert opens == [1]
    assert outputs == [[f"done {each}" for each in mine] for mine in work]
    assert len(manager.cache_entries()) == 1
    assert len(host.files()) == 5 * PROCESSES
    all_right(manager)
    run_all(host, "destroy", work)
    assert host.files() == [] and list(manager.list()) == []


@pytest.mark.field("J3")
def test_two_actions_on_one_instance_exclude_each_other(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    instance = host.instance()
    instance_id = instance.id
    outputs = run_all(host, "create", [[instance_id]] * 6)
    assert sum(out == [f"done {instance_id}"] for out in outputs) >= 1
    (disk,) = manager.list(instance_id)
    assert len(host.files()) == 1
    outputs = run_all(host, "rebuild", [[instance_id]] * 6)
    assert sum(out == [f"done {instance_id}"] for out in outputs) >= 1
    (after,) = manager.list(instance_id)
    assert after.id == disk.id and after.state.settled
    assert len(host.files()) == 1
    all_right(manager)
    outputs = run_all(host, "destroy", [[instance_id]] * 6)
    assert all(out[0].split()[0] in ("done", "busy") for out in outputs)
    assert host.files() == []
    all_right(manager)


@pytest.mark.field("J3")
def test_threads_of_one_manager_work_at_once(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    errors: list[BaseException] = []

    def life(instance: Instance) -> None:
        try:
            for _ in range(3):
                assert isinstance(manager.create(instance), Change)
                manager.connect(instance.id)
                assert len(manager.libvirt_xml(instance.id)) == 2
                manager.disconnect(instance.id)
                manager.rebuild(instance)
                manager.destroy(instance.id)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=life, args=(host.instance(swap_mb=1),))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert host.files() == [] and host.files("locks") == []
    all_right(manager)


@pytest.mark.field("J3")
def test_a_shared_disk_is_attached_by_many_at_once_without_a_loss(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    first = host.instance()
    shared = DiskSpec(name="shared", size=MiB, shareable=True, backend="raw")
    manager.create(first, [shared])
    disk = next(each for each in manager.list(first.id) if each.name == "shared")
    instances = [host.instance() for _ in range(6)]
    failed: list[exc.ImageBackendError] = []

    def attach(instance: Instance) -> None:
        try:
            manager.create(instance, [DiskSpec(name="shared", disk=disk.id)])
        except exc.ImageBackendError as error:
            failed.append(error)

    threads = [
        threading.Thread(target=attach, args=(instance,)) for instance in instances
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A loser of a race is told so and has nothing; it may try again.
    assert all(isinstance(error, exc.StorageError) for error in failed), failed
    owners = manager.disk(disk.id).owners
    assert len(owners) == 1 + len(instances) - len(failed)
    all_right(manager)
    for instance in (first, *instances):
        manager.destroy(instance.id)
    assert host.files() == []
