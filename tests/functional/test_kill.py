# SPDX-License-Identifier: Apache-2.0
"""Killed from outside at every system call that matters, then recovered.

A verb runs in a process of its own under ``strace``, which kills it at the N-th call
of a kind, N = 1, 2, … until the verb ends by itself. After each, recovery runs, and
tools that are not ours compare the storage with the rows: no leak, nothing lost,
every disk that was promised is whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from imagebackend import DiskManager, Instance, UploadTarget
from imagebackend import exceptions as exc
from tests.conftest import HostUnderTest, MiB

#: What changes something outside of the process, or starts another one. Python
#: 3.11 and glibc use the older ones; a newer one counts under its own name.
CALLS = (
    "execve",
    "vfork,clone,clone3",
    "mkdir,mkdirat",
    "link,linkat",
    "rename,renameat,renameat2",
    "unlink,unlinkat",
    "rmdir",
    "fsync,fdatasync",
    "ftruncate,fallocate",
    "flock",
    "ioctl",
    "pwrite64",
    "write",
)
PATTERN = 0x5A


@dataclass
class Scene:
    """A host, an instance, and what its root disk may hold."""

    host: HostUnderTest
    manager: DiskManager
    instance: Instance
    image: bytes

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        """The rows, read by SQLite alone."""
        path = self.host.path / "store" / "imagebackend.sqlite"
        connection = sqlite3.connect(path)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()


def run_killed(verb: Callable[[], object], call: str, number: int) -> str:
    """Run ``verb`` in a child that dies at its ``number``-th ``call``: ``done``,
    ``failed`` (a program that it had started died) or ``killed``."""
    go, ready = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(ready)
            os.read(go, 1)
            verb()
            status = 0
        except exc.ImageBackendError:
            status = 3
        finally:
            os._exit(status)
    os.close(go)
    tracer = subprocess.Popen(
        [
            *("strace", "-f", "-o", "/dev/null", "-p", str(child)),
            *(
                "-e",
                f"trace={call}",
                "-e",
                f"inject={call}:signal=SIGKILL:when={number}",
            ),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr is not None
    attached = tracer.stderr.readline()
    assert "attached" in attached, attached
    os.write(ready, b"g")
    os.close(ready)
    _, status = os.waitpid(child, 0)
    tracer.communicate()
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return "killed"
    return {0: "done", 3: "failed"}[os.WEXITSTATUS(status)]


def recover(scene: Scene) -> None:
    """As after a restart; a child that outlived its parent is waited for."""
    deadline = time.monotonic() + 20
    while True:
        manager = scene.host.manager()
        findings = list(manager.recover(dry_run=False))
        manager.close()
        if not scene.rows("SELECT id FROM operations"):
            break
        assert time.monotonic() < deadline, findings
        time.sleep(0.05)


def check(scene: Scene) -> None:
    """The storage is what the rows say, told by other tools than ours."""
    host = scene.host
    rows = scene.rows("SELECT handle, size, format, state FROM generations")
    assert all(state == "current" for *_, state in rows), rows
    known = {json.loads(str(row[0]))["path"]: row for row in rows}
    assert host.files() == sorted(known), "files and rows differ"
    for name, (_, size, format_, _) in known.items():
        info = json.loads(
            subprocess.run(
                [
                    *("qemu-img", "info", "--output=json", "-f", str(format_)),
                    str(host.path / "instances" / name),
                ],
                check=True,
                capture_output=True,
            ).stdout
        )
        assert info["virtual-size"] == size
    states = {row[0] for row in scene.rows("SELECT state FROM disks")}
    assert states <= {"ready", "kept"}
    for folder in ("locks", "tmp", "cache/tmp"):
        assert host.files(folder) == [], folder
    hidden = [name for name in host.files("images") if name.startswith(".")]
    assert hidden == []


def content(scene: Scene, length: int = MiB) -> bytes | None:
    """The root disk's first bytes, None if there is no such disk."""
    rows = scene.rows(
        "SELECT g.handle, g.format FROM generations g JOIN disks d "
        "ON d.generation_id = g.id WHERE d.name = 'root'"
    )
    if not rows:
        return None
    ((handle, format_),) = rows
    target = scene.host.path / "content"
    source = scene.host.path / "instances" / json.loads(str(handle))["path"]
    subprocess.run(
        [
            *("qemu-img", "dd", "-f", str(format_), "-O", "raw", f"bs={length}"),
            *("count=1", f"if={source}", f"of={target}"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    data = target.read_bytes()
    target.unlink()
    return data


def write_root(scene: Scene) -> None:
    ((handle, format_),) = scene.rows(
        "SELECT g.handle, g.format FROM generations g JOIN disks d "
        "ON d.generation_id = g.id WHERE d.name = 'root'"
    )
    subprocess.run(
        [
            *("qemu-io", "-f", str(format_), "-c", f"write -P {PATTERN} 0 1M"),
            str(scene.host.path / "instances" / json.loads(str(handle))["path"]),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


@pytest.fixture(params=["qcow2", "raw"])
def scene(request: pytest.FixtureRequest, host: HostUnderTest) -> Iterator[Scene]:
    host.set("default_backend", request.param)
    image = host.raw_image()
    manager = host.manager()
    # What a child would import is imported here: it is forked off.
    warm = host.instance()
    manager.create(warm)
    manager.snapshot(warm.id, UploadTarget("warm"))
    manager.destroy(warm.id)
    manager.close()
    yield Scene(host, manager, host.instance(swap_mb=64), image)


def every_kill(
    scene: Scene,
    verb: str,
    prepare: Callable[[], object],
    work: Callable[[DiskManager], object],
    verify: Callable[[str], None],
) -> None:
    """Kill ``work`` at every point; each time everything is checked."""
    points: dict[str, int] = {}
    for call in CALLS:
        number = 0
        while True:
            number += 1
            prepare()
            scene.manager.close()
            outcome = run_killed(lambda: work(scene.host.manager()), call, number)
            recover(scene)
            try:
                check(scene)
                verify(outcome)
            except AssertionError as error:
                raise AssertionError(f"{verb} killed at {call} {number}") from error
            if outcome == "done":
                break
        points[call.partition(",")[0]] = number - 1
    total = sum(points.values())
    line = ", ".join(f"{call} {count}" for call, count in points.items() if count)
    print(
        f"\n{verb} ({scene.host.conf.imagebackend.default_backend}): {total} kill "
        f"points: {line}",
        file=sys.stderr,
    )
    assert total > 10


@pytest.mark.field("J5")
@pytest.mark.timeout(900)
def test_create_makes_all_or_nothing(scene: Scene) -> None:
    def verify(outcome: str) -> None:
        data = content(scene)
        disks = scene.rows("SELECT id FROM disks")
        if outcome == "done":
            assert data is not None
        if data is not None:
            assert data == scene.image and len(disks) == 2
        else:
            assert not disks
            assert not scene.rows("SELECT id FROM instances")
        scene.manager.destroy(scene.instance.id)
        assert scene.host.files() == []

    every_kill(
        scene,
        "create",
        lambda: None,
        lambda manager: manager.create(scene.instance),
        verify,
    )


@pytest.mark.timeout(900)
def test_create_of_an_uncached_image_leaves_a_whole_entry_or_none(
    scene: Scene,
) -> None:
    def prepare() -> None:
        scene.manager.destroy(scene.instance.id)
        scene.host.set("cache_max_age", 0, "imagebackend_images")
        time.sleep(0.01)
        list(scene.manager.prune())
        assert scene.manager.cache_entries() == []

    def verify(outcome: str) -> None:
        for entry in scene.manager.cache_entries():
            assert entry.broken == ""
            base = scene.host.path / "cache" / entry.entry / "base.raw"
            assert base.read_bytes() == scene.image

    every_kill(
        scene,
        "create, image not cached",
        prepare,
        lambda manager: manager.create(scene.instance),
        verify,
    )


@pytest.mark.timeout(900)
def test_rebuild_leaves_the_old_disk_or_the_new_one(scene: Scene) -> None:
    def prepare() -> None:
        scene.manager.destroy(scene.instance.id)
        scene.manager.create(scene.instance)
        write_root(scene)

    def verify(outcome: str) -> None:
        data = content(scene)
        assert data in (scene.image, bytes([PATTERN]) * MiB)
        if outcome == "done":
            assert data == scene.image
        assert len(scene.rows("SELECT id FROM disks")) == 2

    every_kill(
        scene,
        "rebuild",
        prepare,
        lambda manager: manager.rebuild(scene.instance),
        verify,
    )


@pytest.mark.timeout(900)
def test_resize_keeps_the_data_at_the_old_size_or_the_new_one(scene: Scene) -> None:
    assert scene.instance.flavor is not None
    flavor = dataclasses.replace(scene.instance.flavor, root_gb=2)
    larger = dataclasses.replace(scene.instance, flavor=flavor)

    def prepare() -> None:
        scene.manager.destroy(scene.instance.id)
        scene.manager.create(scene.instance)
        write_root(scene)

    def verify(outcome: str) -> None:
        assert content(scene) == bytes([PATTERN]) * MiB
        ((size,),) = scene.rows("SELECT size FROM disks WHERE name = 'root'")
        assert size in (1 << 30, 2 << 30)
        if outcome == "done":
            assert size == 2 << 30

    every_kill(scene, "resize", prepare, lambda manager: manager.resize(larger), verify)


@pytest.mark.timeout(900)
def test_snapshot_leaves_a_whole_image_or_none(scene: Scene) -> None:
    target = scene.host.images / "snap.qcow2"
    notes = scene.host.images / "snap.json"

    def prepare() -> None:
        target.unlink(missing_ok=True)
        notes.unlink(missing_ok=True)
        if not scene.rows("SELECT id FROM disks"):
            scene.manager.create(scene.instance)
            write_root(scene)

    def verify(outcome: str) -> None:
        assert target.exists() == notes.exists()
        if outcome == "done":
            assert target.exists()
        if target.exists():
            whole(target, scene)
        assert content(scene) == bytes([PATTERN]) * MiB

    every_kill(
        scene,
        "snapshot",
        prepare,
        lambda manager: manager.snapshot(scene.instance.id, UploadTarget("snap")),
        verify,
    )


def whole(image: Path, scene: Scene) -> None:
    ((handle, format_),) = scene.rows(
        "SELECT g.handle, g.format FROM generations g JOIN disks d "
        "ON d.generation_id = g.id WHERE d.name = 'root'"
    )
    disk = scene.host.path / "instances" / json.loads(str(handle))["path"]
    subprocess.run(
        ["qemu-img", "compare", "-q", "-f", "qcow2", "-F", str(format_), image, disk],
        check=True,
    )


@pytest.mark.timeout(900)
def test_destroy_removes_everything_or_can_be_asked_again(scene: Scene) -> None:
    def prepare() -> None:
        if not scene.rows("SELECT id FROM disks"):
            scene.manager.create(scene.instance)

    def verify(outcome: str) -> None:
        disks = scene.rows("SELECT id FROM disks")
        assert len(disks) in (0, 2)
        if outcome == "done":
            assert disks == []

    every_kill(
        scene,
        "destroy",
        prepare,
        lambda manager: manager.destroy(scene.instance.id),
        verify,
    )


@pytest.mark.field("C1")
@pytest.mark.timeout(900)
def test_prune_removes_an_entry_whole_and_never_one_in_use(scene: Scene) -> None:
    host = scene.host
    host.set("cache_max_age", 0, "imagebackend_images")
    used = host.instance()
    scene.manager.create(used)
    host.raw_image("unused")

    def prepare() -> None:
        scene.manager.prefetch("unused")

    def verify(outcome: str) -> None:
        entries = {each.image_id: each for each in scene.manager.cache_entries()}
        assert all(each.broken == "" for each in entries.values())
        if host.conf.imagebackend.default_backend == "qcow2":
            assert "raw-image" in entries
        if outcome == "done":
            assert "unused" not in entries
        assert content(scene) == scene.image

    every_kill(scene, "prune", prepare, lambda manager: list(manager.prune()), verify)
