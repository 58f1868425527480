# SPDX-License-Identifier: Apache-2.0
"""Files on this host: copies that keep holes, durability, digests of content."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator

from imagebackend import exceptions as exc
from imagebackend.model import KiB, MiB

_FICLONE = 0x40049409
_BLOCK = 64 * KiB
_BLOCKS = "blocks-sha256"
#: What a file system answers that has no such call, or not for these two files.
_NOT_THIS_WAY = (
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
)


def copy_sparse(source: str, target_fd: int) -> bool:
    """Copy a raw file onto an empty one: reflinked where the file system can, else
    only what is not a hole. True if it was reflinked, so that no data moved."""
    with open(source, "rb") as file:
        source_fd = file.fileno()
        try:
            fcntl.ioctl(target_fd, _FICLONE, source_fd)
            return True
        except OSError as error:
            if error.errno not in (
                *_NOT_THIS_WAY,
                errno.ENOTTY,
                errno.ETXTBSY,
            ):
                raise
        os.ftruncate(target_fd, os.fstat(source_fd).st_size)
        for start, stop in data_ranges(source_fd):
            _copy_range(source_fd, target_fd, start, stop)
    return False


def _copy_range(source_fd: int, target_fd: int, start: int, stop: int) -> None:
    while start < stop:
        done = 0
        try:
            done = os.copy_file_range(source_fd, target_fd, stop - start, start, start)
        except OSError as error:
            if error.errno not in _NOT_THIS_WAY:
                raise
        # Some file systems say that they copied nothing where they cannot.
        if done == 0:
            block = os.pread(source_fd, min(stop - start, 4 * MiB), start)
            done = os.pwrite(target_fd, block, start)
        if done == 0:
            raise exc.IntegrityError("a file became shorter while it was copied")
        start += done


def fsync_path(path: str) -> None:
    """Make a file's content, or a folder's entries, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class ContentDigest:
    """``blocks-sha256``: of every block that is not zero, with its place, and of the
    length. Holes and written zeros are equal, so it costs what the data takes up,
    not the file's length, and outlives a copy.

    Fed in order; only the last piece may be no multiple of a block.
    """

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def update(self, start: int, data: bytes) -> None:
        for offset in range(0, len(data), _BLOCK):
            block = data[offset : offset + _BLOCK]
            if block.count(0) != len(block):
                self._hasher.update(b"%d\n" % (start + offset))
                self._hasher.update(block)

    def text(self, length: int) -> str:
        self._hasher.update(b"%d\n" % length)
        return f"{_BLOCKS}:{self._hasher.hexdigest()}"


def digest_of(
    path: str, algorithm: str = _BLOCKS, seen: Callable[[int], None] | None = None
) -> str:
    """``algorithm:hex`` of a file's content.

    :param algorithm: ``blocks-sha256``, or one of hashlib's over every byte.
    """
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        length = os.fstat(fd).st_size
        if algorithm != _BLOCKS:
            hasher = hashlib.new(algorithm)
            while chunk := file.read(4 * MiB):
                hasher.update(chunk)
                if seen is not None:
                    seen(file.tell())
            return f"{algorithm}:{hasher.hexdigest()}"
        content = ContentDigest()
        position = 0
        for start, stop in data_ranges(fd):
            # Holes may be smaller than a block, which counts once and whole.
            position = max(position, start - start % _BLOCK)
            while position < min(stop, length):
                wanted = min(MiB, -(-(stop - position) // _BLOCK) * _BLOCK)
                content.update(position, _pread(fd, wanted, position))
                position += wanted
                if seen is not None:
                    seen(min(position, length))
        return content.text(length)


def _pread(fd: int, wanted: int, position: int) -> bytes:
    """``wanted`` bytes, fewer only at the file's end."""
    data = os.pread(fd, wanted, position)
    while len(data) < wanted:
        more = os.pread(fd, wanted - len(data), position + len(data))
        if not more:
            break
        data += more
    return data


def data_ranges(fd: int) -> Iterator[tuple[int, int]]:
    """Where a file has data, hole by hole left out."""
    end = os.fstat(fd).st_size
    position = 0
    while position < end:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        position = min(os.lseek(fd, start, os.SEEK_HOLE), end)
        yield start, position


def replace_text(path: str, text: str) -> None:
    """The file has this text, for its owner alone; whoever reads it meanwhile sees the
    old one or the new one, whole. It need not outlive a power cut."""
    try:
        with open(path, encoding="utf-8") as file:
            if file.read() == text:
                return
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    part = f"{path}.{os.getpid()}.{threading.get_ident()}"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, path)


def nearest(path: str) -> str:
    """The path, or what there is of it: the folder in which the rest would be made."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def can_be_made(path: str) -> bool:
    """Whether this process may make the folder, or write into it."""
    found = nearest(path)
    return (
        os.path.isdir(found)
        and os.access(found, os.W_OK | os.X_OK)
        # root may write everywhere, they say.
        and file_system(found) not in _NOT_ON_DISK
    )


#: File systems of the kernel's own, where nobody can make a folder.
_NOT_ON_DISK = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "securityfs"})

#: File systems that several hosts may have mounted.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "afs", "gfs2", "ocfs2"),
        *("fuse.glusterfs", "fuse.sshfs", "fuse.ceph", "fuse.mfs"),
    }
)


def file_system(path: str, mounts: str = "/proc/self/mounts") -> str:
    """The type of the file system that a path is on, or will be; empty: not known."""
    path = os.path.realpath(path)
    found, longest = "", -1
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        # The kernel writes a blank in a path as its octal code.
        point = point.replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one place the later one is seen.
        if inside and len(point) >= longest:
            found, longest = kind, len(point)
    return found
