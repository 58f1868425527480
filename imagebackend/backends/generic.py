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
from imagebackend.model import Marker, Want

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
