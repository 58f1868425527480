# SPDX-License-Identifier: Apache-2.0
"""Disks as raw files: whole, fast, shareable."""

from __future__ import annotations

import os

from imagebackend import exceptions as exc
from imagebackend.backends.base import Blank, Fill, FromGeneration, FromImage
from imagebackend.backends.files import FileBackend, blank_file
from imagebackend.local_files import copy_sparse
from imagebackend.model import (
    Capabilities,
    FileSource,
    Generation,
    Handle,
    Path,
    Placement,
    Source,
    Want,
    Way,
)


class RawBackend(FileBackend):
    """A raw file each. An image is reflinked where the file system can, else copied
    without its holes."""

    FORMAT = "raw"

    def capabilities(self, at: Placement | Generation) -> Capabilities:
        return Capabilities(
            live_resize=Way.HYPERVISOR,
            live_snapshot=Way.HYPERVISOR,
            shareable=True,
            formats=("raw",),
        )

    def _way(self, want: Want) -> Path:
        if want.fill == "Blank":
            return Path.BLANK
        return Path.COPY if want.fill == "FromImage" else Path.CONVERT

    def _fill(self, gen: Generation, path: str, fill: Fill) -> tuple[Path, Handle]:
        match fill:
            case Blank():
                blank_file(path, gen.size, fill)
                return Path.BLANK, {}
            case FromImage(image):
                with image.cached() as cached:
                    if cached.format == "raw":
                        way = self._copy(cached.path, path)
                    else:
                        source = FileSource(cached.path, cached.format)
                        way = self._convert(gen, source, path)
            case FromGeneration(source=source):
                way = self._convert(gen, source, path)
            case _:
                raise exc.NotSupported(
                    f"backend {self.name!r} cannot fill by {type(fill).__name__}"
                )
        # The content may be shorter than the disk; it never is longer (plan).
        if os.stat(path).st_size < gen.size:
            os.truncate(path, gen.size)
        return way, {}

    def _copy(self, source: str, path: str) -> Path:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return Path.CLONE if copy_sparse(source, fd) else Path.COPY
        finally:
            os.close(fd)

    def _convert(self, gen: Generation, source: Source, path: str) -> Path:
        os.truncate(path, gen.size)
        self._qemu_img.convert(
            source,
            FileSource(path, "raw"),
            target_is_blank=True,
        )
        return Path.CONVERT

    def _virtual_size(self, fd: int, gen: Generation, path: str) -> int:
        return os.fstat(fd).st_size

    def _grow(self, gen: Generation, path: str, size: int) -> None:
        os.truncate(path, size)
