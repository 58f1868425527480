# SPDX-License-Identifier: Apache-2.0
"""``tox -e bench``: each case against the bare tool; exit 1 when over a limit."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import ceph, cinder, cinder_poll
from benchmarks.measure import (
    BenchHost,
    Result,
    child,
    instance,
    interleaved,
    run,
    timed,
)
from imagebackend.model import DiskState, GenerationState, GiB, Lifecycle, MiB, Role
from imagebackend.store.rows import DiskRow, GenerationRow, InstanceRow, OwnerRow

NOVA = "nova>=34,<35"
Case = Callable[[Path, int], list[Result]]


def warm_create(folder: Path, runs: int) -> list[Result]:
    """One qcow2 root disk, its image in the cache; rows and fsyncs included."""
    host = BenchHost(folder)
    host.image("image", 16 * MiB)
    bare = folder / "bare"
    bare.mkdir()
    with host.manager() as manager:
        manager.create(instance())
        (entry,) = manager.cache_entries()
        base = folder / "cache" / entry.entry / "base.raw"

        def ours() -> float:
            new = instance()
            seconds = timed(lambda: manager.create(new))
            manager.destroy(new.id)
            return seconds

        def theirs() -> float:
            path = bare / str(uuid.uuid4())

            def work() -> None:
                argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw"]
                run([*argv, "-b", str(base), str(path), str(2 * GiB)])
                for each in (path, bare):
                    fd = os.open(each, os.O_RDONLY)
                    os.fsync(fd)
                    os.close(fd)

            seconds = timed(work)
            path.unlink()
            return seconds

        mine, bare_median = interleaved(ours, theirs, runs)
    command = "qemu-img create -f qcow2 -F raw -b BASE FILE 2G; fsync FILE, FOLDER"
    return [Result("warm create", command, mine, bare_median, 2.0)]


def one_fetch(folder: Path, _runs: int) -> list[Result]:
    """50 creates of one uncached image from 10 processes at once."""
    host = BenchHost(folder)
    image = host.image("image", 64 * MiB)
    with host.manager() as manager:
        list(manager.list())
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", "create", host.config_file, "5"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        for _ in range(10)
    ]
    for each in children:
        assert each.stderr and each.stderr.readline() == "ready\n"
    with _opens(image) as opens:
        for each in children:
            each.communicate("go\n")
    failed = sum(each.returncode != 0 for each in children)
    with host.manager() as manager:
        made = len(list(manager.list()))
    assert (failed, made) == (0, 50)
    bare = "times that the image was opened, 50 creates, 10 processes"
    return [Result("one fetch", bare, opens[0], None, 1, "x")]


def cold_fetch(folder: Path, runs: int) -> list[Result]:
    """A raw image of 1 GiB into an empty cache; the best of each side."""
    host = BenchHost(folder)
    host.image("warm", MiB)
    image = host.image("image", GiB)
    copy = folder / "copy"
    memory: list[float] = []

    def ours() -> float:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        found = child("fetch", str(host.config_file))
        memory.append(found["mib"])
        return found["seconds"]

    def theirs() -> float:
        copy.unlink(missing_ok=True)
        dd = ["dd", f"if={image}", f"of={copy}", "bs=1M", "conv=fsync", "status=none"]
        return timed(lambda: (run(dd), run(["sha512sum", str(copy)])))

    mine, bare = [], []
    for _ in range(max(5, runs // 3)):
        mine.append(ours())
        bare.append(theirs())
    command = "dd bs=1M conv=fsync; sha512sum"
    return [
        Result("cold fetch of 1 GiB", command, min(mine), min(bare), 1.3),
        Result("  its memory", "peak, with children", max(memory), None, 150, "MiB"),
    ]


def many_disks(folder: Path, runs: int) -> list[Result]:
    """``list`` of one instance with 10,000 disks in the store and with none."""
    empty, full = BenchHost(folder / "empty"), BenchHost(folder / "full")
    mine = instance(image=None)
    for host in (empty, full):
        with host.manager() as manager:
            list(manager.list())
        _insert(host, mine.id, 1)
    _insert(full, None, 10_000)
    with empty.manager() as small, full.manager() as large:
        assert len(list(large.list())) == 10_001

        def lists(manager: object) -> Callable[[], float]:
            def work() -> object:
                return [list(manager.list(mine.id)) for _ in range(20)]  # type: ignore[attr-defined]

            return lambda: timed(work) / 20

        ours, bare = interleaved(lists(large), lists(small), runs)
    found = child("audit", str(full.config_file))
    what = f"peak over {found['findings']:.0f} findings, {found['seconds']:.1f} s"
    return [
        Result("list, 10,000 disks", "the same in a store without", ours, bare, 2.0),
        Result("  memory of audit", what, found["mib"], None, 200, "MiB"),
    ]


def start_up(_folder: Path, runs: int) -> list[Result]:
    """What the first line of a program that imports the library waits for."""
    python = [sys.executable, "-c"]
    loaded, bare = interleaved(
        lambda: timed(lambda: run([*python, "import imagebackend"])),
        lambda: timed(lambda: run([*python, "pass"])),
        runs,
    )
    command = str(Path(sys.executable).with_name("imagebackend"))
    helps = [timed(lambda: run([command, "--help"])) for _ in range(runs)]
    return [
        Result(
            "import imagebackend", "beyond python's start", loaded - bare, None, 0.15
        ),
        Result("imagebackend --help", "", statistics.median(helps), None, 0.6),
    ]


def nova_peer(folder: Path, runs: int) -> list[Result]:
    """The same as ``warm_create``, as Nova does it; left out without its packages."""
    python = nova_environment()
    if python is None:
        return []
    done = subprocess.run(
        [
            *(python, "-W", "ignore", Path(__file__).with_name("nova_peer.py")),
            *(folder, str(runs)),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    command = "qemu-img create -f qcow2 -F raw -b BASE FILE 2G"
    name = "Nova 34 Qcow2.cache()"
    return [Result(name, command, found["ours"], found["theirs"], None)]


def nova_environment() -> Path | None:
    """The Python of an environment that has Nova, made when it is first asked for."""
    environment = Path(__file__).parents[1] / ".testbed" / "nova"
    python = environment / "bin" / "python"
    try:
        if not python.exists():
            print(f"    installing {NOVA} into {environment}", flush=True)
            shutil.rmtree(environment, ignore_errors=True)
            run([sys.executable, "-m", "venv", str(environment)])
        run([str(python), "-m", "pip", "-q", "install", NOVA])
    except subprocess.CalledProcessError as error:
        print(f"    left out: Nova cannot be had here ({error})", flush=True)
        return None
    return python


CASES: dict[str, Case] = {
    "warm-create": warm_create,
    "nova-peer": nova_peer,
    "one-fetch": one_fetch,
    "cold-fetch": cold_fetch,
    "many-disks": many_disks,
    "start-up": start_up,
    **ceph.CASES,
    **cinder.CASES,
    **cinder_poll.CASES,
}


def _insert(host: BenchHost, instance_id: str | None, count: int) -> None:
    """Rows of disks as if they had been made, without their files."""
    with host.manager() as manager:
        context = manager._ctx
        with context.store.writing() as tx:
            for _ in range(count):
                owner, disk_id, row_id = instance_id or str(uuid.uuid4()), _id(), _id()
                text = json.dumps({"instance": {"id": owner}, "disks": []})
                tx.insert(
                    InstanceRow(owner, "project", context.host.id, text),
                    DiskRow(
                        disk_id,
                        "root",
                        "project",
                        context.host.id,
                        Role.ROOT,
                        Lifecycle.EPHEMERAL,
                        DiskState.READY,
                        GiB,
                        {},
                        generation_id=row_id,
                    ),
                    OwnerRow(disk_id, owner, "root", "virtio", "vda", 0),
                    GenerationRow(
                        row_id,
                        disk_id,
                        "root",
                        owner,
                        "project",
                        context.host.id,
                        GenerationState.CURRENT,
                        "qcow2",
                        "folder:new",
                        GiB,
                        "qcow2",
                        {},
                    ),
                )


def _id() -> str:
    return str(uuid.uuid4())


@contextlib.contextmanager
def _opens(path: Path) -> Iterator[list[int]]:
    """How often the file was opened in the block, told by inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    libc.inotify_add_watch(fd, os.fsencode(path), 0x20)
    counted = [0]
    try:
        yield counted
        counted[0] = len(os.read(fd, 1 << 16)) // 16
    finally:
        os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES, action="append", help="repeatable")
    parser.add_argument("--runs", type=int, default=15, help="of each side")
    parser.add_argument("--folder", help="on the file system to measure")
    parser.add_argument("--json", metavar="FILE", help="the figures for programs")
    options = parser.parse_args()
    results: list[Result] = []
    print(f"{'':24}{'ours':>12}{'bare':>12}{'ratio':>8}{'limit':>12}")
    for name in options.only or CASES:
        with tempfile.TemporaryDirectory(dir=options.folder or "/var/tmp") as folder:
            for result in CASES[name](Path(folder), options.runs):
                results.append(result)
                print(result.line(), flush=True)
                if result.bare:
                    print(f"{'':4}against: {result.bare}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(each) for each in results]))
    return 0 if all(each.within for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
