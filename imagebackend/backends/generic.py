# SPDX-License-Identifier: Apache-2.0
"""Help that several backends share: file systems, copies, names.

Nothing here keeps state; each function says what it leaves behind when it fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Sequence

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.model import FileSource, Marker, Want

#: File systems that a blank disk can have: program, arguments, Debian package.
_MKFS: dict[str, tuple[Sequence[str], str, str, int]] = {
    "ext4": (("mkfs.ext4", "-q", "-F"), "-L", "e2fsprogs", 16),
    "xfs": (("mkfs.xfs", "-q", "-f"), "-L", "xfsprogs", 12),
    "vfat": (("mkfs.vfat", "-I"), "-n", "dosfstools", 11),
    "swap": (("mkswap", "-q"), "-L", "util-linux", 16),
}
_MKFS_TIMEOUT = 600
_OBJECT = re.compile(
    r"\.?(?P<disk>[a-z0-9][a-z0-9_-]*)\."
    r"(?P<generation>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\."
    r"(?P<deployment>[0-9a-f]{12})(?P<temporary>\.part|\.fs)?"
)


def object_name(disk: str, marker: Marker) -> str:
    """A name that carries the marker, for storages where names are all there is."""
    return f"{disk}.{marker.generation_id}.{marker.deployment_id}"


def marker_of(name: str) -> Marker | None:
    """The marker in a name made by :func:`object_name`, or of a temporary beside it."""
    match = _OBJECT.fullmatch(name)
    return match and Marker(match["generation"], match["deployment"])


def make_filesystem(path: str, fs: str, label: str | None) -> None:
    """Format the raw file at ``path``, of its whole size.

    :raises InvalidValue: unknown file system. :raises MissingDependency:
    """
    if fs not in _MKFS:
        raise exc.InvalidValue("file system", fs, "one of " + ", ".join(_MKFS))
    argv, label_option, package, label_limit = _MKFS[fs]
    command = [*argv]
    if label:
        command += [label_option, label[:label_limit]]
    try:
        result = processes.run([*command, path], timeout=_MKFS_TIMEOUT, package=package)
    except TimeoutError as error:
        raise exc.StorageError(str(error)) from None
    if result.returncode:
        raise exc.StorageError(
            f"{argv[0]} failed on {path}: {result.stderr.strip()}", path=path
        )


def refuse_fills(backend: str, want: Want, able: Sequence[str]) -> None:
    """:raises NotSupported: the wanted fill is none of ``able``."""
    if want.fill not in able:
        raise exc.NotSupported(
            f"backend {backend!r} cannot fill a disk by {want.fill}: it can by "
            + ", ".join(able),
            backend=backend,
            fill=want.fill,
        )


def qcow2_chain(path: str) -> FileSource:
    """A qcow2 file on a share, with the files of the same folder that it is based on.

    Its header is the storage's, which made the file over another one; a guest writes
    into what the header describes, and onto the file below no more.

    :raises IntegrityError: the chain cannot be told without guessing.
    """
    chain = [(path, "qcow2")]
    while chain[-1][1] == "qcow2":
        told = _backing(chain[-1][0])
        if told is None:
            break
        name, format_ = told
        below = os.path.join(os.path.dirname(path), os.path.basename(name))
        if below in (each for each, _ in chain) or format_ not in ("raw", "qcow2"):
            raise exc.IntegrityError(
                f"{chain[-1][0]} is based on {name!r} of format {format_!r}: that must "
                f"be another file of the same folder, raw or qcow2",
                path=path,
            )
        chain.append((below, format_))
    source: FileSource | None = None
    for each, format_ in reversed(chain):
        source = FileSource(each, format_, source)
    assert source is not None
    return source


#: Of a qcow2 file's header extension that has its backing file's format
#: (docs/interop/qcow2.txt of QEMU).
_BACKING_FORMAT = 0xE2792ACA


def _backing(path: str) -> tuple[str, str] | None:
    """Name and format of what a qcow2 file is based on, as its header has them."""
    try:
        with open(path, "rb") as file:
            header = file.read(65536)
    except OSError as error:
        raise processes.space_error(error, path) from error
    if header[:4] != b"QFI\xfb" or len(header) < 104:
        raise exc.IntegrityError(f"{path} is no qcow2 file", path=path)
    offset, size = struct.unpack(">QI", header[8:20])
    if not offset:
        return None
    name = header[offset : offset + size].decode("utf-8", "backslashreplace")
    (position,) = struct.unpack(">I", header[100:104])
    while position + 8 <= min(offset, len(header)):
        kind, length = struct.unpack(">II", header[position : position + 8])
        if kind == 0:
            break
        value = header[position + 8 : position + 8 + length]
        if kind == _BACKING_FORMAT:
            return name, value.decode("ascii", "backslashreplace")
        position += 8 + -(-length // 8) * 8
    return name, ""


def qemu_has_open(path: str) -> bool:
    """Whether a QEMU has the file open: it holds locks on bytes 100 and up
    (block/file-posix.c), shared ones, which a probe for an exclusive one meets."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        probe = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 100, 200, 0)
        with contextlib.suppress(OSError):
            answer = fcntl.fcntl(fd, _F_OFD_GETLK, probe)
            kind: int = struct.unpack("hhqqi4x", answer)[0]
            return kind != fcntl.F_UNLCK
    finally:
        os.close(fd)
    return False


_F_OFD_GETLK = 36
