# SPDX-License-Identifier: Apache-2.0
"""Disks as qcow2 files: overlays on this host's image cache.

An overlay's header always names its backing file *and* that file's format. The
handle names them too, and what QEMU is told comes from the handle, so a header is
never asked for a path. The size is read from the header, at the offset that the
format has for it; a guest cannot write there.
"""

from __future__ import annotations

import contextlib
import os
import struct

from imagebackend import exceptions as exc
from imagebackend.backends.base import Blank, Fill, FromGeneration, FromImage
from imagebackend.backends.files import FileBackend, blank_file
from imagebackend.model import (
    Capabilities,
    FileSource,
    Generation,
    Handle,
    Path,
    Placement,
    Want,
    Way,
)

_MAGIC = b"QFI\xfb"
#: Virtual size, entries of the first table, where it is, where the refcounts' is
#: (docs/interop/qcow2.txt of QEMU).
_HEADER = struct.Struct(">24xQ4xIQQ")


class Qcow2Backend(FileBackend):
    """A qcow2 file each. No data is copied from a cached image."""

    FORMAT = "qcow2"

    def capabilities(self, at: Placement | Generation) -> Capabilities:
        return Capabilities(
            live_resize=Way.HYPERVISOR,
            live_snapshot=Way.HYPERVISOR,
            shareable=False,
            formats=("qcow2",),
        )

    def _refuse(self, want: Want) -> None:
        if want.shareable:
            raise exc.NotSupported(
                f"backend {self.name!r} cannot hold a shareable disk: QEMU lets only "
                f"one guest open a qcow2 file; use a raw backend for it",
                backend=self.name,
            )

    def _way(self, want: Want) -> Path:
        return {
            "Blank": Path.BLANK,
            "FromImage": Path.CLONE,
            "FromGeneration": Path.CONVERT,
        }[want.fill]

    def _uses_cache(self, want: Want) -> bool:
        return want.fill == "FromImage"

    def _fill(self, gen: Generation, path: str, fill: Fill) -> tuple[Path, Handle]:
        match fill:
            case Blank(fs=None):
                self._qemu_img.create(path, gen.size, "qcow2")
                return Path.BLANK, {}
            case Blank():
                self._formatted(gen, path, fill)
                return Path.BLANK, {}
            case FromImage(image):
                with image.cached() as cached:
                    self._qemu_img.create_overlay(
                        path, gen.size, cached.path, cached.format
                    )
                    backing = {"path": cached.path, "format": cached.format}
                return Path.CLONE, {"backing": backing}
            case FromGeneration(source=source):
                self._qemu_img.create(path, gen.size, "qcow2")
                self._qemu_img.convert(
                    source, FileSource(path, "qcow2"), target_is_blank=True
                )
                return Path.CONVERT, {}
            case _:
                raise exc.NotSupported(
                    f"backend {self.name!r} cannot fill by {type(fill).__name__}"
                )

    def _formatted(self, gen: Generation, path: str, fill: Blank) -> None:
        # mkfs writes raw; the few blocks that it wrote are then carried over.
        raw = path.removesuffix(".part") + ".fs"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(raw)
        with open(raw, "xb"):
            pass
        blank_file(raw, gen.size, fill)
        self._qemu_img.create(path, gen.size, "qcow2")
        self._qemu_img.convert(
            FileSource(raw, "raw"), FileSource(path, "qcow2"), target_is_blank=True
        )
        os.unlink(raw)

    def _source(self, gen: Generation) -> FileSource:
        backing = gen.handle.get("backing")
        return FileSource(
            self._path(gen),
            gen.format,
            backing and FileSource(backing["path"], backing["format"]),
        )

    def _virtual_size(self, fd: int, gen: Generation, path: str) -> int:
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or header[:4] != _MAGIC:
            raise self._damaged(gen, path, "it has no qcow2 header")
        size, entries, table, refcounts = _HEADER.unpack(header)
        end = max(table + 8 * entries, refcounts + 8)
        length = os.fstat(fd).st_size
        if length < end:
            what = f"it has {length} bytes, its tables end at {end}"
            raise self._damaged(gen, path, what)
        return int(size)

    def _grow(self, gen: Generation, path: str, size: int) -> None:
        self._qemu_img.resize(self._source(gen), size)
