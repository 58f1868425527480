# SPDX-License-Identifier: Apache-2.0
"""Cases on Ceph, against the same librbd calls made bare, and against Nova.

They need a cluster: the test bed's, brought up for the case unless ``CEPH_CONF`` names
one that runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchHost, Result, instance, interleaved, timed
from imagebackend import DiskManager
from imagebackend.model import GiB, MiB

ROOT = Path(__file__).parents[1]
USER = "imagebackend"
_POOL = "vms"


class BareCeph:
    """librbd itself, on one connection."""

    def __init__(self, conf: str, user: str = USER) -> None:
        import rados
        import rbd

        self.rbd = rbd
        self.cluster = rados.Rados(conffile=conf, rados_id=user)
        self.cluster.connect()
        self.fsid = self.cluster.get_fsid()
        self.vms = self.cluster.open_ioctx(_POOL)
        self.images = self.cluster.open_ioctx("images")

    def create(self) -> str:
        """The floor: clone, open, resize, one metadata set."""
        name = str(uuid.uuid4())
        self.rbd.RBD().clone(self.images, "bench", "snap", self.vms, name)
        with self.rbd.Image(self.vms, name) as image:
            image.resize(2 * GiB)
            image.metadata_set("key", "value" * 20)
        return name

    def remove(self, name: str) -> None:
        self.rbd.RBD().remove(self.vms, name)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """The configuration of a Ceph that answers."""
    if "CEPH_CONF" in os.environ:
        yield os.environ["CEPH_CONF"]
        return
    bed = [ROOT / "tools" / "testbed", "--folder", folder / "bed"]
    subprocess.run([*bed, "up", "ceph"], check=True)
    try:
        yield str(folder / "bed" / "ceph" / "ceph.conf")
    finally:
        subprocess.run([*bed, "down", "--wipe"], check=True)


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[tuple[BareCeph, BenchHost]]:
    """A host whose image has a snapshot in Glance's pool, and the bare side."""
    from imagebackend.images.file import FileSource

    with cluster(folder) as conf:
        host = BenchHost(
            folder / "host",
            "enabled_backends = rbd\n"
            f"[rbd]\nceph_conf = {conf}\nuser = {USER}\npools = {_POOL}\n",
        )
        path = host.image("image", 16 * MiB)
        admin = BareCeph(conf, "admin")
        admin.rbd.RBD().create(admin.images, "bench", 16 * MiB)
        with admin.rbd.Image(admin.images, "bench") as image:
            image.write(path.read_bytes(), 0)
            image.create_snap("snap")
        location = f"rbd://{admin.fsid}/images/bench/snap"
        told = FileSource.locations
        FileSource.locations = lambda *_, **__: [location]  # type: ignore[method-assign]
        try:
            yield BareCeph(conf), host
        finally:
            FileSource.locations = told  # type: ignore[method-assign]
            with admin.rbd.Image(admin.images, "bench") as image:
                image.remove_snap("snap")
            admin.rbd.RBD().remove(admin.images, "bench")


def rbd_create(folder: Path, runs: int) -> list[Result]:
    """A root disk cloned from Glance's image, rows and their fsyncs on our side."""
    with prepared(folder) as (bare, host), host.manager() as manager:
        manager.create(instance())  # connects

        def ours() -> float:
            new = instance()
            seconds = timed(lambda: manager.create(new))
            manager.destroy(new.id)
            return seconds

        def theirs() -> float:
            names: list[str] = []
            seconds = timed(lambda: names.append(bare.create()))
            bare.remove(names[0])
            return seconds

        mine, floor = interleaved(ours, theirs, runs)
        results = [
            Result(
                "rbd create",
                "librbd: clone, open, resize, metadata_set, close; one connection",
                mine,
                floor,
                1.2,
            )
        ]
        peer = _nova(bare, host, runs)
        if peer is not None:
            what = "Nova 34 Rbd: clone, grow; the image is known to be clonable"
            results.append(Result("  beside Nova's", what, mine, peer, 0.5))
        _empty(manager)
    return results


def rbd_many(folder: Path, _runs: int) -> list[Result]:
    """100 creates at once from 8 threads, both sides three times in turns."""
    count, threads = 100, 8
    with prepared(folder) as (bare, host), host.manager() as manager:
        manager.create(instance())

        def ours() -> float:
            queue = [instance() for _ in range(count)]
            seconds = _in_threads(queue, manager.create, threads)
            _empty(manager)
            return seconds

        def theirs() -> float:
            made: list[str] = []
            seconds = _in_threads(
                list(range(count)), lambda _: made.append(bare.create()), threads
            )
            _in_threads(made, bare.remove, threads)
            return seconds

        mine, floor = interleaved(ours, theirs, 3)
    what = f"the same calls, {threads} threads, one connection"
    return [Result(f"rbd, {count} creates", what, mine, floor, 1.3)]


def rbd_pool(folder: Path, runs: int) -> list[Result]:
    """A pool with 1,000 images: what audit and capacity cost beside asking it."""
    with prepared(folder) as (bare, host), host.manager() as manager:
        manager.create(instance())
        names = [f"root.{uuid.uuid4()}.0123456789ab" for _ in range(1000)]
        _in_threads(
            list(names), lambda name: bare.rbd.RBD().create(bare.vms, name, MiB), 8
        )

        def listed() -> object:
            found = list(bare.rbd.RBD().list2(bare.vms))
            return found, list(bare.rbd.RBD().trash_list(bare.vms))

        audit, floor = interleaved(
            lambda: timed(lambda: list(manager.audit())), lambda: timed(listed), runs
        )
        command = json.dumps({"prefix": "df", "detail": "detail", "format": "json"})

        def df() -> object:
            return bare.cluster.mon_command(command, b"")

        capacity, asked = interleaved(
            lambda: timed(lambda: list(manager.capacity())), lambda: timed(df), runs
        )
        _in_threads(names, bare.remove, 8)
        _empty(manager)
    return [
        Result("audit, 1,000 images", "librbd: list2, trash_list", audit, floor, None),
        Result("capacity", "mon_command df", capacity, asked, None),
    ]


def _in_threads(queue: list[Any], work: Callable[[Any], object], count: int) -> float:
    """Seconds until the queue is empty. An error of one ends it all."""
    errors: list[BaseException] = []

    def each() -> None:
        while not errors:
            try:
                item = queue.pop()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=each) for _ in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds


def _empty(manager: DiskManager) -> None:
    ids = list({disk.instance_id for disk in manager.list()})
    _in_threads(ids, manager.destroy, 8)


def _nova(bare: BareCeph, host: BenchHost, runs: int) -> float | None:
    """Nova's median; None without its packages."""
    from benchmarks.run import nova_environment

    python = nova_environment()
    if python is None:
        return None
    for library in ("rados", "rbd"):
        file = Path(sys.modules[library].__file__ or "").resolve()
        for site in python.parents[1].glob("lib/python3*/site-packages"):
            with contextlib.suppress(FileExistsError):
                (site / file.name).symlink_to(file)
    done = subprocess.run(
        [
            *(python, "-W", "ignore", Path(__file__).with_name("nova_rbd_peer.py")),
            *(host.folder, host.conf["rbd"].ceph_conf, USER, _POOL, bare.fsid),
            str(runs),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found["nova"]


CASES: dict[str, Callable[[Path, int], list[Result]]] = {
    "rbd-create": rbd_create,
    "rbd-many": rbd_many,
    "rbd-pool": rbd_pool,
}
