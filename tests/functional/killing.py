# SPDX-License-Identifier: Apache-2.0
"""Help for tests that kill a verb from outside.

The verb runs in a process of its own under ``strace``, which kills it at the N-th call
of a kind, N = 1, 2, … until the verb ends by itself. After each, recovery runs, and
tools that are not ours compare the storage with the rows.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagebackend import DiskManager, Instance
from imagebackend import exceptions as exc
from tests.conftest import SUMMARY, HostUnderTest, MiB

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
#: Calls of which every so many-th is enough: SQLite's writes into its log, of which
#: nothing is true before the fsync that follows them; messages to Ceph, most of which
#: free one object after the other, and after each of which a dead client is waited
#: for. IMAGEBACKEND_KILL_EVERY=1 kills at all of them.
STEPS = (
    {}
    if "IMAGEBACKEND_KILL_EVERY" in os.environ
    else {"pwrite64": 4, "sendmsg": 10, "sendto": 4}
)
#: Where they are in Cinder: requests leave by it.
CINDER_CALLS = ("sendto", "fsync,fdatasync")
#: The same where the disks are in Ceph: its client sends, the rows are synced.
CEPH_CALLS = ("sendmsg", "fsync,fdatasync")
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
        except BaseException:
            traceback.print_exc()
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


def compare(scene: Scene) -> None:
    """The storage is what the rows say, told by other tools than ours."""
    host = scene.host
    rows = scene.rows("SELECT handle, size, format, state FROM generations")
    assert all(state == "current" for *_, state in rows), rows
    known = {_name(str(row[0])): row for row in rows}
    assert host.objects() == sorted(known), "objects and rows differ"
    for name, (handle, size, format_, _) in known.items():
        assert _size(scene, str(handle), str(format_)) == size, name
    states = {row[0] for row in scene.rows("SELECT state FROM disks")}
    assert states <= {"ready", "kept"}
    for folder in ("locks", "tmp", "cache/tmp"):
        assert host.files(folder) == [], folder
    hidden = [name for name in host.files("images") if name.startswith(".")]
    assert hidden == []


def content(scene: Scene, length: int = MiB) -> bytes | None:
    """The root disk's first bytes, None if there is no such disk."""
    rows = scene.rows(_ROOT)
    if not rows:
        return None
    ((handle, format_),) = rows
    source = _reached(scene, str(handle))
    target = scene.host.path / "content"
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
    ((handle, format_),) = scene.rows(_ROOT)
    subprocess.run(
        [
            *("qemu-io", "-f", str(format_), "-c", f"write -P {PATTERN} 0 1M"),
            _reached(scene, str(handle)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


_ROOT = (
    "SELECT g.handle, g.format FROM generations g JOIN disks d "
    "ON d.generation_id = g.id WHERE d.name = 'root'"
)


def _name(handle: str) -> str:
    """An object as the storage lists it."""
    facts = json.loads(handle)
    return str(
        facts["path"] if "path" in facts else f"{facts['pool']}/{facts['image']}"
    )


def _reached(scene: Scene, handle: str) -> str:
    """The object, for QEMU's tools."""
    if "path" in json.loads(handle):
        return str(scene.host.path / "instances" / _name(handle))
    assert scene.host.ceph is not None
    return f"rbd:{_name(handle)}:id=admin:conf={scene.host.ceph.conf}"


def _size(scene: Scene, handle: str, format_: str) -> int:
    if scene.host.ceph is not None and "image" in json.loads(handle):
        return int(scene.host.ceph.info(_name(handle))["size"])
    told = subprocess.run(
        [
            *("qemu-img", "info", "-U", "--output=json", "-f", format_),
            _reached(scene, handle),
        ],
        check=True,
        capture_output=True,
    ).stdout
    return int(json.loads(told)["virtual-size"])


def every_kill(
    scene: Scene,
    verb: str,
    prepare: Callable[[], object],
    work: Callable[[DiskManager], object],
    verify: Callable[[str], None],
    calls: Sequence[str] = CALLS,
    check: Callable[[Scene], None] | None = None,
) -> None:
    """Kill ``work`` at every point; each time everything is checked.

    :param check: what compares storage and rows, where the storage needs another.
    """
    check = check or compare
    if scene.host.ceph is not None:
        calls = CEPH_CALLS
    points: dict[str, int] = {}
    for call in calls:
        step = STEPS.get(call, 1)
        number, tried = 1 - step, 0
        while True:
            number += step
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
            tried += 1
        points[call.partition(",")[0]] = tried
    total = sum(points.values())
    line = ", ".join(f"{call} {count}" for call, count in points.items() if count)
    backend = scene.host.conf.imagebackend.default_backend or "qcow2"
    SUMMARY.append(f"{verb} ({backend}): {total} kill points: {line}")
    assert total > 5


def whole(image: Path, scene: Scene) -> None:
    ((handle, format_),) = scene.rows(_ROOT)
    disk = _reached(scene, str(handle))
    subprocess.run(
        ["qemu-img", "compare", "-q", "-f", "qcow2", "-F", str(format_), image, disk],
        check=True,
    )
