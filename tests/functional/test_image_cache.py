# SPDX-License-Identifier: Apache-2.0
"""Images and their cache, the slow part: many garbled files, cycles, system calls."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebackend import DiskManager
from imagebackend import exceptions as exc
from imagebackend.host import Host
from imagebackend.images.base import Readable
from imagebackend.images.cache import ImageCache
from imagebackend.images.file import FileSource
from imagebackend.model import GiB, ImageInfo, KiB, MiB
from tests import image_files as files
from tests.conftest import HostUnderTest
from tests.image_files import MemorySource

GROUP = "imagebackend_images"
FORK = multiprocessing.get_context("fork")


def cache_of(host: HostUnderTest, needed: set[str] | None = None) -> ImageCache:
    return ImageCache(host.conf, Host(host.conf), lambda: needed or set())


# --- garbled images ----------------------------------------------------------

_TABLES = {
    "qcow2": [(0, 120), (64 * KiB, 256), (128 * KiB, 256), (192 * KiB, 256)],
    "qcow2-small-clusters": [(0, 120), (4 * KiB, 16 * KiB)],
    "vmdk": [(0, 80), (512, 400), (10752, 4096)],
    "vmdk-stream": [(0, 80), (512, 400), (10752, 4096)],
    "vhd": [(0, 80), (512, 64), (1536, 32), (-512, 80)],
    "vhdx": [(64 * KiB, 80), (192 * KiB, 96), (256 * KiB, 96), (3 * MiB, 300)],
    "vdi": [(0, 512), (512, 64)],
}
_ODD = [b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0\0\0\1", b"\1\0\0\0"]


@pytest.mark.field("A7", "A12")
@pytest.mark.parametrize("recipe", _TABLES)
def test_garbled_image_ends_in_an_error_of_images_or_in_a_disk(
    host: HostUnderTest, recipe: str
) -> None:
    """Whatever its tables say: no traceback, no other error, nothing left behind, and
    no child that takes memory or time without end."""
    rng = random.Random(recipe)
    folder = host.path / "honest"
    folder.mkdir()
    whole = files.make(folder, recipe, files.content()).read_bytes()
    format_ = recipe.partition("-")[0]
    fates = {"refused": 0, "passed": 0}
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            start, length = rng.choice(_TABLES[recipe])
            place = (start + len(data)) % len(data) + rng.randrange(length)
            value = rng.choice([rng.randbytes(rng.choice([1, 2, 4, 8])), *_ODD])
            data[place : place + len(value)] = value
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        image = files.info_of(format_, digest=None)
        started = time.monotonic()
        try:
            base, path = files.fetched(
                host.conf, host.path, format_, bytes(data), info=image
            )
        except (exc.ImageRejected, exc.IntegrityError, exc.SizeRefused):
            fates["refused"] += 1
        else:
            fates["passed"] += 1
            assert path.stat().st_size == base.virtual_size <= GiB
            path.unlink()
        assert time.monotonic() - started < 10
    assert fates["refused"] > 20, fates
    assert fates["passed"] > 2, fates


# --- many hosts and processes ------------------------------------------------


@pytest.mark.field("C2")
def test_fifty_creates_by_ten_processes_fetch_once(
    host: HostUnderTest, tmp_path: Path
) -> None:
    """Counted by the system calls that open the image."""
    host.qcow2_image("image", 64 * MiB)
    code = (
        "import sys, threading\n"
        "from tests.functional.test_image_cache import create_some\n"
        "create_some(sys.argv[1], 5)\n"
    )
    log = tmp_path / "strace"
    command = ["strace", "-f", "-e", "trace=openat", "-o"]
    children = [
        subprocess.Popen(
            [*command, f"{log}.{number}", sys.executable, "-c", code, host.config_file],
            stderr=subprocess.PIPE,
        )
        for number in range(10)
    ]
    for child in children:
        _, err = child.communicate(timeout=200)
        assert child.returncode == 0, err.decode()
    opened = sum(
        text.count(f'"{host.images / "image.qcow2"}"')
        for text in (Path(f"{log}.{number}").read_text() for number in range(10))
    )
    assert opened == 1
    assert len(host.files("instances")) == 50
    assert len(host.manager().cache_entries()) == 1


def create_some(config_file: str, count: int) -> None:
    """In a process of its own."""
    from oslo_config import cfg

    import imagebackend.conf
    from imagebackend import Flavor, Instance

    conf = cfg.ConfigOpts()
    imagebackend.conf.register(conf)
    conf(["--config-file", config_file], project="imagebackend")
    failed: list[BaseException] = []
    with DiskManager(conf) as manager:

        def create() -> None:
            flavor = Flavor("small", 1, 0, 0, {})
            try:
                manager.create(Instance(str(uuid.uuid4()), "project", "image", flavor))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=create) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]


@pytest.mark.field("C1", "C8")
def test_hosts_that_use_and_prune_one_folder_never_lose_a_base(
    make_host: Callable[[str], HostUnderTest], tmp_path: Path
) -> None:
    """Four hosts, a few images, each pruning as hard as it can."""
    images = {f"image-{number}": os.urandom(64 * KiB) for number in range(3)}
    bad = tmp_path / "bad"
    end = time.monotonic() + 6

    def live(name: str) -> None:
        host = make_host(name)
        host.set("cache_path", str(tmp_path / "shared"), GROUP)
        host.set("cache_max_age", 0, GROUP)
        needed: set[str] = set()
        cache = cache_of(host, needed)
        source = MemorySource(images)
        rng = random.Random(name)
        held: dict[str, tuple[str, bytes]] = {}
        try:
            while time.monotonic() < end:
                image = rng.choice(list(images))
                with cache.use(source, source.get(image), limit=GiB) as found:
                    if rng.random() < 0.5:
                        needed.add(found.entry)
                        held[found.entry] = (found.path, images[image])
                for _ in cache.prune():
                    pass
                for path, data in held.values():
                    assert Path(path).read_bytes() == data
                if rng.random() < 0.2:
                    needed.clear()
                    held.clear()
        except BaseException as error:
            bad.write_text(f"{name}: {error!r}")
            raise

    children = [FORK.Process(target=live, args=(f"host-{n}",)) for n in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert not bad.exists(), bad.read_text()


@pytest.mark.field("C12", "C6")
def test_five_hundred_images_come_and_go_and_leave_no_locks(
    host: HostUnderTest,
) -> None:
    host.set("cache_max_age", 0, GROUP)
    cache = cache_of(host)
    source = MemorySource({f"image-{n}": os.urandom(4096) for n in range(500)})
    for number, image in enumerate(source.images):
        cache.prefetch(source, source.get(image), limit=GiB)
        if number % 5 == 4:
            assert {each.action for each in cache.prune()} == {"removed"}
    path = Path(cache.path)
    assert {each.name for each in path.iterdir()} == {"hosts", "locks", "tmp"}
    assert len(list((path / "locks").iterdir())) <= 64
    assert list((path / "tmp").iterdir()) == []
    assert cache.hosts() == [cache._host.id]


# --- killed ------------------------------------------------------------------


@pytest.mark.field("C4", "C10")
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "unlink", "unlinkat"])
def test_fetch_killed_at_any_call_leaves_a_whole_entry_or_none(
    host: HostUnderTest, call: str
) -> None:
    """Seen from outside: whatever instant it dies at, the next one gets good bytes."""
    data = host.qcow2_image("image", 4 * MiB)
    code = (
        "import sys\n"
        "from tests.functional.test_image_cache import fetch_and_prune\n"
        "fetch_and_prune(sys.argv[1])\n"
    )
    points = 0
    for number in range(1, 60):
        done = subprocess.run(
            [
                *("strace", "-f", "-qq", "-o", "/dev/null"),
                *("-e", f"inject={call}:signal=SIGKILL:when={number}"),
                *(sys.executable, "-c", code, host.config_file),
            ],
            capture_output=True,
        )
        cache = cache_of(host)
        cache.sweep()
        tmp = Path(cache.path) / "tmp"
        assert not tmp.exists() or os.listdir(tmp) == [], number
        assert cache.strangers() == [], number
        for entry in cache.entries(verify=True):
            assert entry.broken == "", number
        source = FileSource(host.conf)
        image = cache.prefetch(source, source.get("image"), limit=GiB)
        assert Path(image.path).read_bytes() == data
        shutil.rmtree(cache.path)
        if done.returncode == 0:
            break
        points += 1
    else:
        pytest.fail("it never came to its end")
    print(f"fetch and prune: {points} points of {call}")
    assert points


def fetch_and_prune(config_file: str) -> None:
    from oslo_config import cfg

    import imagebackend.conf

    conf = cfg.ConfigOpts()
    imagebackend.conf.register(conf)
    conf(["--config-file", config_file], project="imagebackend")
    conf.set_override("cache_max_age", 0, GROUP)
    cache = ImageCache(conf, Host(conf), set)
    source = FileSource(conf)
    cache.prefetch(source, source.get("image"), limit=GiB)
    for finding in cache.prune():
        assert finding.action == "removed"


@pytest.mark.field("C4")
def test_kernel_sees_the_flush_before_the_rename(
    host: HostUnderTest, tmp_path: Path
) -> None:
    host.raw_image("image")
    code = (
        "import sys\n"
        "from tests.functional.test_image_cache import fetch_and_prune\n"
        "fetch_and_prune(sys.argv[1])\n"
    )
    log = tmp_path / "strace"
    subprocess.run(
        [
            *("strace", "-f", "-y", "-e", "trace=fsync,fdatasync,rename,renameat2"),
            *("-o", log, sys.executable, "-c", code, host.config_file),
        ],
        check=True,
    )
    lines = [line.split(None, 1)[1] for line in log.read_text().splitlines()]
    entry = re.compile(r'rename\("[^"]*/tmp/(image-[^"/]+)", "[^"]*/(image-[^"/.]+)"')
    (place,) = [n for n, line in enumerate(lines) if entry.match(line)]
    flushed = [line for line in lines[:place] if line.startswith("fsync(")]
    assert any("/base.raw>" in line for line in flushed)
    assert any("/meta.json" in line or "/tmp/image-" in line for line in flushed)
    assert lines[place + 1].startswith("fsync(") and "/cache>" in lines[place + 1]


# --- large -------------------------------------------------------------------


def test_large_image_takes_little_memory_and_is_refused_over_the_limit(
    host: HostUnderTest,
) -> None:
    with open(host.images / "image.raw", "wb") as file:
        for place in range(0, 1024, 8):
            file.seek(place * MiB)
            file.write(os.urandom(MiB))
        file.truncate(GiB + MiB)
    source = FileSource(host.conf)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    image = cache_of(host).prefetch(source, source.get("image"), limit=2 * GiB)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 * 1024
    files.run("cmp", image.path, host.images / "image.raw")
    assert os.stat(image.path).st_blocks * 512 <= 130 * MiB
    host.set("max_image_gb", 1, GROUP)
    data = os.stat(host.images / "image.raw").st_size
    with pytest.raises(exc.SizeRefused, match="max_image_gb"):
        files.fetched(
            host.conf,
            host.path,
            "qcow2",
            b"",
            info=files.info_of("qcow2", size=data, digest=None),
        )


def test_large_image_without_a_known_size_is_refused_over_the_limit(
    host: HostUnderTest,
) -> None:
    """It is seen only while it comes."""
    host.set("max_image_gb", 1, GROUP)

    class Zeros(MemorySource):
        def read(self, size: int, /) -> bytes:
            return bytes(size)

        @contextlib.contextmanager
        def open(self, info: ImageInfo, *, auth: Any = None) -> Iterator[Readable]:
            yield self

    cache = cache_of(host)
    with pytest.raises(exc.SizeRefused, match="max_image_gb"):
        cache.prefetch(Zeros(), files.info_of("raw", digest=None), limit=100 * GiB)
    assert os.listdir(Path(cache.path) / "tmp") == []
