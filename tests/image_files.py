# SPDX-License-Identifier: Apache-2.0
"""Image files for tests, honest and hostile, made by the tools themselves."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oslo_config import cfg

from imagebackend.images import fetch
from imagebackend.images.base import ImageSource, Readable
from imagebackend.images.inspect import Inspected, Verdict
from imagebackend.model import GiB, ImageInfo, KiB, MiB, ProgressCallback, UploadTarget

#: How qemu-img makes each declared format.
RECIPES = {
    "qcow2": ("qcow2", ""),
    "qcow2-v2": ("qcow2", "compat=0.10"),
    "qcow2-small-clusters": ("qcow2", "cluster_size=4096"),
    "vmdk": ("vmdk", "subformat=monolithicSparse"),
    "vmdk-stream": ("vmdk", "subformat=streamOptimized"),
    "vhd": ("vpc", "subformat=dynamic"),
    "vhdx": ("vhdx", "subformat=dynamic,block_size=1M"),
    "vhdx-fixed": ("vhdx", "subformat=fixed,block_size=1M"),
    "vdi": ("vdi", ""),
    "vdi-static": ("vdi", "static=on"),
}
FORMATS = ("raw", "qcow2", "vmdk", "vhd", "vhdx", "vdi", "iso")


def run(*argv: object) -> str:
    """A tool's standard output."""
    done = subprocess.run(
        [str(each) for each in argv], check=True, capture_output=True, text=True
    )
    return done.stdout


def content(size: int = 3 * MiB) -> bytes:
    """What a guest would read: data, a hole, data that ends in no full cluster."""
    data = bytearray(size)
    data[: 200 * KiB] = os.urandom(200 * KiB)
    data[size // 2 + 4096 : size // 2 + 70000] = os.urandom(65904)
    data[-1000:] = os.urandom(1000)
    return bytes(data)


def make(folder: Path, recipe: str, data: bytes) -> Path:
    """An honest image that holds ``data``."""
    format_, options = RECIPES[recipe]
    raw = folder / f"{uuid.uuid4()}.tmp"
    raw.write_bytes(data)
    path = folder / f"{recipe}.{recipe.partition('-')[0]}"
    extra = ["-o", options] if options else []
    run("qemu-img", "convert", "-f", "raw", "-O", format_, *extra, raw, path)
    raw.unlink()
    return path


def make_iso(folder: Path, *, hybrid: bool = False) -> Path:
    """A CD; ``hybrid``: with a partition table in front, as installers have it."""
    tree = folder / "tree"
    tree.mkdir(exist_ok=True)
    (tree / "file").write_bytes(os.urandom(300 * KiB))
    path = folder / ("hybrid.iso" if hybrid else "plain.iso")
    run("genisoimage", "-quiet", "-R", "-o", path, tree)
    if hybrid:
        data = bytearray(path.read_bytes())
        data[:512] = partition_table(0x17, 1, len(data) // 512 - 1)
        path.write_bytes(data)
    return path


def with_footer(data: bytes) -> bytes:
    """A stream-optimized VMDK as VMware writes it: its directory is told at the end."""
    marker = (1).to_bytes(8, "little") + bytes(4) + (3).to_bytes(4, "little")
    footer = marker.ljust(512, b"\0") + data[:512] + bytes(512)
    return patched(data, 56, b"\xff" * 8) + footer


def partition_table(kind: int, start: int, sectors: int) -> bytes:
    """A master boot record with one partition."""
    entry = (
        bytes([0, 0, 2, 0, kind, 255, 255, 255])
        + start.to_bytes(4, "little")
        + sectors.to_bytes(4, "little")
    )
    return bytes(446) + entry.ljust(64, b"\0") + b"\x55\xaa"


def patched(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]


def info_of(
    format_: str, data: bytes | None = None, *, name: str = "image", **says: Any
) -> ImageInfo:
    if data is not None and "digest" not in says:
        says["digest"] = f"sha256:{hashlib.sha256(data).hexdigest()}"
        says.setdefault("size", len(data))
    return ImageInfo(name, format_, says.get("digest") or "v1", **says)


class Bytes:
    """A stream of bytes that gives ``most`` of them at a time."""

    def __init__(self, data: bytes, most: int = 1 << 30) -> None:
        self._data = memoryview(data)
        self._most = most

    def read(self, size: int, /) -> bytes:
        size = min(size, self._most)
        piece, self._data = bytes(self._data[:size]), self._data[size:]
        return piece


class MemorySource(ImageSource):
    """Images by id, in memory, that may go wrong: ``spoil`` gets the number of the
    try, from 1, and the bytes, and gives those that come."""

    def __init__(
        self,
        images: dict[str, bytes] | None = None,
        spoil: Callable[[int, bytes], bytes] = lambda _number, data: data,
    ) -> None:
        self.images = images or {}
        self.spoil = spoil
        self.opened = 0

    def get(
        self, image_id: str, *, auth: Any = None, project_id: str = ""
    ) -> ImageInfo:
        return info_of("raw", self.images[image_id], name=image_id)

    @contextlib.contextmanager
    def open(self, info: ImageInfo, *, auth: Any = None) -> Iterator[Readable]:
        self.opened += 1
        yield Bytes(self.spoil(self.opened, self.images[info.id]))

    def check_target(self, into: UploadTarget) -> None:
        raise AssertionError("a fetch writes nothing to its source")

    def put(
        self,
        into: UploadTarget,
        path: str,
        token: str,
        *,
        progress: ProgressCallback | None = None,
    ) -> ImageInfo:
        raise AssertionError("a fetch writes nothing to its source")

    def discard(self, into: UploadTarget, token: str) -> None:
        raise AssertionError("a fetch writes nothing to its source")

    def list(self) -> Iterator[ImageInfo]:
        return iter(())


def verdict(format_: str, data: bytes, *, most: int = 1 << 30) -> Verdict:
    """What the checks say of ``data`` declared as ``format_``."""
    inspected = Inspected(Bytes(data, most), info_of(format_))
    while inspected.read(MiB):
        pass
    return inspected.verdict()


def fetched(
    conf: cfg.ConfigOpts,
    folder: Path,
    format_: str,
    data: bytes,
    *,
    info: ImageInfo | None = None,
    limit: int = GiB,
) -> tuple[fetch.Base, Path]:
    """The whole way of an image, up to what becomes a backing file."""
    target = folder / str(uuid.uuid4())
    target.mkdir()
    info = info or info_of(format_, data)
    base = fetch.fetch(
        conf, MemorySource({info.id: data}), info, str(target), limit=limit
    )
    return base, target / base.file
