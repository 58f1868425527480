# SPDX-License-Identifier: Apache-2.0
"""One image from its source: right bytes, right length, in time, or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebackend import exceptions as exc
from imagebackend.host import Host
from imagebackend.images.access import CachedAccess, load_source
from imagebackend.images.base import Readable
from imagebackend.images.cache import ImageCache
from imagebackend.images.file import FileSource
from imagebackend.model import GiB, ImageInfo, KiB, MiB, Progress
from tests import image_files as files
from tests.conftest import HostUnderTest
from tests.image_files import MemorySource, info_of

GROUP = "imagebackend_images"
DATA = os.urandom(3 * MiB + 5)


@pytest.fixture
def cache(host: HostUnderTest) -> ImageCache:
    return ImageCache(host.conf, Host(host.conf), in_use=set)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _seconds: None)


def nothing_left(cache: ImageCache) -> bool:
    found = set(os.listdir(cache.path)) - {"hosts", "locks"}
    return found <= {"tmp"} and not os.listdir(os.path.join(cache.path, "tmp"))


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    place = len(data) // 3
    return files.patched(data, place, bytes([data[place] ^ 1]))


def lengthen(data: bytes) -> bytes:
    return data + b"x"


SPOILS = [truncate, flip, lengthen]
Spoil = Callable[[bytes], bytes]


# --- digest and length -------------------------------------------------------


@pytest.mark.field("A12")
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("times", [1, 3])
def test_torn_download_is_tried_again(
    host: HostUnderTest, cache: ImageCache, spoil: Spoil, times: int
) -> None:
    host.set("num_retries", 3, GROUP)
    source = MemorySource(
        {"image": DATA},
        lambda number, data: spoil(data) if number <= times else data,
    )
    with cache.use(source, source.get("image"), limit=GiB) as image:
        assert Path(image.path).read_bytes() == DATA
    assert source.opened == times + 1
    assert os.listdir(os.path.join(cache.path, "tmp")) == []


@pytest.mark.field("A12")
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("retries", [0, 2])
def test_download_that_is_always_torn_is_an_error_and_leaves_nothing(
    host: HostUnderTest, cache: ImageCache, spoil: Spoil, retries: int
) -> None:
    host.set("num_retries", retries, GROUP)
    source = MemorySource({"image": DATA}, lambda _number, data: spoil(data))
    with (
        pytest.raises(exc.IntegrityError, match="image image") as caught,
        cache.use(source, source.get("image"), limit=GiB),
    ):
        pytest.fail("a torn image was handed out")
    assert caught.value.code == "integrity"
    assert source.opened == retries + 1
    assert nothing_left(cache)


@pytest.mark.field("A12")
@pytest.mark.parametrize("spoil", [truncate, lengthen])
def test_length_alone_tells_where_there_is_no_digest(
    cache: ImageCache, spoil: Spoil
) -> None:
    source = MemorySource({"image": DATA}, lambda _number, data: spoil(data))
    info = info_of("raw", size=len(DATA))
    with pytest.raises(exc.IntegrityError, match="bytes came instead of"):
        cache.prefetch(source, info, limit=GiB)
    assert nothing_left(cache)


class Endless(MemorySource):
    """Never comes to an end; counts what it gave."""

    given = 0

    @contextlib.contextmanager
    def open(self, info: ImageInfo, *, auth: Any = None) -> Iterator[Readable]:
        yield self

    def read(self, size: int, /) -> bytes:
        self.given += size
        assert self.given < 100 * MiB, "nobody stopped reading"
        return b"x" * size


@pytest.mark.field("A12")
@pytest.mark.parametrize(
    ("info", "error"),
    [
        (info_of("raw", size=3 * MiB), exc.IntegrityError),
        (info_of("qcow2", size=3 * MiB), exc.IntegrityError),
        (info_of("raw"), exc.SizeRefused),
        (info_of("iso"), exc.SizeRefused),
    ],
)
def test_stream_that_does_not_end_is_not_followed(
    host: HostUnderTest, cache: ImageCache, info: ImageInfo, error: type[Exception]
) -> None:
    host.set("num_retries", 0, GROUP)
    source = Endless()
    with pytest.raises(error):
        cache.prefetch(source, info, limit=10 * MiB)
    assert source.given <= 12 * MiB
    assert nothing_left(cache)


class Unavailable(MemorySource):
    """Breaks off in the middle ``times`` times."""

    times = 1

    @contextlib.contextmanager
    def open(self, info: ImageInfo, *, auth: Any = None) -> Iterator[Readable]:
        with super().open(info, auth=auth) as stream:
            if self.opened > self.times:
                yield stream
            else:
                yield self

    def read(self, size: int, /) -> bytes:
        raise exc.StorageUnavailable("the connection broke")


@pytest.mark.field("A12")
def test_source_that_breaks_off_is_asked_again(cache: ImageCache) -> None:
    source = Unavailable({"image": DATA})
    image = cache.prefetch(source, source.get("image"), limit=GiB)
    assert Path(image.path).read_bytes() == DATA and source.opened == 2
    source.times = 100
    with pytest.raises(exc.StorageUnavailable, match="broke"):
        cache.prefetch(source, info_of("raw", DATA, name="image", digest=None), limit=1)


@pytest.mark.parametrize("algorithm", ["sha256", "sha384", "sha512"])
@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_digest_is_checked_by_its_own_algorithm(
    cache: ImageCache, algorithm: str, case: Callable[[str], str]
) -> None:
    digest = case(hashlib.new(algorithm, DATA).hexdigest())
    info = info_of("raw", DATA, digest=f"{algorithm}:{digest}")
    image = cache.prefetch(MemorySource({"image": DATA}), info, limit=GiB)
    assert Path(image.path).read_bytes() == DATA
    assert [each.broken for each in cache.entries(verify=True)] == [""]


@pytest.mark.field("A12")
@pytest.mark.parametrize(
    "digest",
    [
        "md5:" + hashlib.md5(DATA).hexdigest(),
        "sha1:" + hashlib.sha1(DATA).hexdigest(),
        "crc32:00000000",
        hashlib.sha512(DATA).hexdigest(),
        "SHA512:" + hashlib.sha512(DATA).hexdigest(),
        "sha512:",
        "sha512:abc",
        "sha512:" + "x" * 128,
        "sha256:" + hashlib.sha512(DATA).hexdigest(),
        ":",
        "../../etc:0",
    ],
)
def test_digest_that_proves_nothing_is_refused_at_once(
    cache: ImageCache, digest: str
) -> None:
    source = MemorySource({"image": DATA})
    with pytest.raises(exc.ImageRejected, match="digest"):
        cache.prefetch(source, info_of("raw", DATA, digest=digest), limit=GiB)
    assert source.opened == 1
    assert nothing_left(cache)


def test_image_without_a_digest_is_refused_where_one_is_required(
    host: HostUnderTest, cache: ImageCache
) -> None:
    host.set("require_digest", True, GROUP)
    source = MemorySource({"image": DATA})
    with pytest.raises(exc.ImageRejected, match="require_digest"):
        cache.prefetch(source, info_of("raw", DATA, digest=None), limit=GiB)
    assert source.opened == 0
    cache.prefetch(source, info_of("raw", DATA), limit=GiB)


# --- sizes -------------------------------------------------------------------


@pytest.mark.field("B6", "B10")
def test_image_larger_than_the_disk_is_refused_and_leaves_nothing(
    host: HostUnderTest, cache: ImageCache
) -> None:
    path = host.path / "big"
    files.run("qemu-img", "create", "-q", "-f", "qcow2", path, "40G")
    for format_, data, limit in (
        ("raw", DATA, len(DATA) - 1),
        ("qcow2", path.read_bytes(), 40 * GiB - 1),
    ):
        source = MemorySource({"image": data})
        with pytest.raises(exc.SizeRefused, match=f"there are {limit}"):
            cache.prefetch(source, info_of(format_, data), limit=limit)
        assert nothing_left(cache)


@pytest.mark.field("B6")
def test_cached_image_larger_than_another_disk_is_refused(cache: ImageCache) -> None:
    source = MemorySource({"image": DATA})
    info = source.get("image")
    cache.prefetch(source, info, limit=len(DATA))
    with pytest.raises(exc.SizeRefused):
        cache.prefetch(source, info, limit=len(DATA) - 1)
    assert len(list(cache.entries())) == 1


def test_image_over_the_operators_limit_is_refused_before_a_byte_is_read(
    host: HostUnderTest, cache: ImageCache
) -> None:
    host.set("max_image_gb", 1, GROUP)
    source = MemorySource({"image": DATA})
    with pytest.raises(exc.SizeRefused, match="max_image_gb"):
        cache.prefetch(source, info_of("qcow2", size=GiB + 1), limit=100 * GiB)
    assert source.opened == 0 and nothing_left(cache)


def test_content_is_sparse_where_it_is_zero_and_not_longer(
    cache: ImageCache,
) -> None:
    data = bytes(20 * MiB) + b"x" + bytes(20 * MiB + 7)
    source = MemorySource({"image": data})
    image = cache.prefetch(source, source.get("image"), limit=GiB)
    facts = os.stat(image.path)
    assert facts.st_size == len(data) == image.virtual_size
    assert facts.st_blocks * 512 <= MiB
    assert Path(image.path).read_bytes() == data


def test_progress_tells_what_is_done_and_of_how_much(
    host: HostUnderTest, cache: ImageCache
) -> None:
    data = files.make(host.path, "qcow2", DATA + bytes(507)).read_bytes()
    seen: list[Progress] = []
    source = MemorySource({"image": data})
    cache.prefetch(source, info_of("qcow2", data), limit=GiB, progress=seen.append)
    fetched = [each for each in seen if each.what == "fetch image"]
    converted = [each for each in seen if each.what == "convert image"]
    assert fetched + converted == seen
    for part in (fetched, converted):
        assert part[-1].done == part[-1].total


@pytest.mark.field("A7")
def test_limit_of_qemu_img_is_told_as_such_not_as_a_bad_image(
    host: HostUnderTest,
    cache: ImageCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = files.make(host.path, "qcow2", DATA + bytes(507)).read_bytes()
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "qemu-img"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    host.set("copy_timeout", 1, "imagebackend_qemu_img")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
        with pytest.raises(exc.LimitExceeded, match="copy_timeout"):
            cache.prefetch(
                MemorySource({"image": data}), info_of("qcow2", data), limit=GiB
            )
    assert nothing_left(cache)
    cache.prefetch(MemorySource({"image": data}), info_of("qcow2", data), limit=GiB)


def test_host_without_qemu_img_says_so_and_keeps_nothing(
    host: HostUnderTest, cache: ImageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = files.make(host.path, "qcow2", DATA + bytes(507)).read_bytes()
    monkeypatch.setenv("PATH", "/nowhere")
    source = MemorySource({"image": data})
    with pytest.raises(exc.MissingDependency):
        cache.prefetch(source, info_of("qcow2", data), limit=GiB)
    assert source.opened == 1, "trying again installs nothing"
    assert nothing_left(cache)


@pytest.mark.field("A5", "A12")
def test_image_that_is_refused_is_not_asked_for_again(cache: ImageCache) -> None:
    source = MemorySource({"image": DATA})
    with pytest.raises(exc.ImageRejected):
        cache.prefetch(source, info_of("qcow2", DATA), limit=GiB)
    assert source.opened == 1
    assert nothing_left(cache)


def test_interrupted_fetch_leaves_nothing(cache: ImageCache) -> None:
    def stop(progress: Progress) -> None:
        if progress.done > MiB:
            raise KeyboardInterrupt

    source = MemorySource({"image": DATA})
    with pytest.raises(KeyboardInterrupt):
        cache.prefetch(source, source.get("image"), limit=GiB, progress=stop)
    assert nothing_left(cache)


# --- access ------------------------------------------------------------------


def test_access_fetches_only_when_somebody_asks_for_bytes(cache: ImageCache) -> None:
    source = MemorySource({"image": DATA})
    info = source.get("image")
    access = CachedAccess(source, cache, info, limit=GiB)
    assert (access.info, source.opened) == (info, 0)
    assert not os.path.exists(cache.path)
    with access.cached() as image:
        assert Path(image.path).read_bytes() == DATA
    assert source.opened == 1


def test_source_is_loaded_by_name(host: HostUnderTest) -> None:
    assert isinstance(load_source(host.conf), FileSource)
    host.set("source", "no-such-source", GROUP)
    with pytest.raises(exc.ConfigError, match="no-such-source"):
        load_source(host.conf)


def test_source_whose_library_is_missing_names_what_to_install(
    host: HostUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "broken-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: broken\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[imagebackend.image_sources]\nbroken = no_such_library.source:Source\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _forget_entry_points()
    host.set("source", "broken", GROUP)
    try:
        with pytest.raises(exc.MissingDependency, match=r"imagebackend\[broken\]"):
            load_source(host.conf)
    finally:
        monkeypatch.undo()
        _forget_entry_points()


def _forget_entry_points() -> None:
    from stevedore import ExtensionManager

    ExtensionManager.ENTRY_POINT_CACHE.clear()


def test_memory_does_not_grow_with_the_image(
    host: HostUnderTest, cache: ImageCache
) -> None:
    """Only what is looked at is kept of a stream."""
    import tracemalloc

    path = host.images / "large.raw"
    path.touch()
    os.truncate(path, 64 * MiB)
    with open(path, "r+b") as file:
        for place in range(0, 64 * MiB, 4 * MiB):
            file.seek(place)
            file.write(os.urandom(64 * KiB))
    source = FileSource(host.conf)
    tracemalloc.start()
    cache.prefetch(source, source.get("large"), limit=GiB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * MiB
