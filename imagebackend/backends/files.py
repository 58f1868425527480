# SPDX-License-Identifier: Apache-2.0
"""What raw and qcow2 have in common: disks as files in a folder of instances.

An object is ``<instances_path>/<instance>/<disk>.<generation>.<deployment>``: the
name is the marker, so an object is ours from the moment it exists, on every file
system. It is made under a temporary name beside it and linked into place when it
is whole and flushed; linking, unlike renaming, never replaces anything.

The folder carries an id of its own (``.folder-id``), so that a share which is not
mounted, or another one, is told from a disk that is gone.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import re
import stat as stat_module
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.backends import generic
from imagebackend.backends.base import (
    Backend,
    Blank,
    Fill,
    Record,
)
from imagebackend.conf import backends as options
from imagebackend.local_files import can_be_made, fsync_path, nearest
from imagebackend.model import (
    Capabilities,
    Connection,
    Connector,
    Creation,
    FileSource,
    Finding,
    Found,
    Generation,
    Handle,
    Inventory,
    Marker,
    Path,
    Placement,
    Severity,
    Stat,
    Want,
)
from imagebackend.qemu_img import QemuImg

LOG = log.getLogger(__name__)

_FOLDER_ID = ".folder-id"
#: The scope in a plan before the folder exists.
_NEW_FOLDER = "folder:new"
_NO_ID = f"is not there or has no {_FOLDER_ID}"
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class FileBackend(Backend):
    """A folder of disk files. Subclasses say format and how a file is filled."""

    OPTIONS: ClassVar[Sequence[cfg.Opt]] = options.FILES
    FORMAT: ClassVar[str]

    # --- for subclasses ------------------------------------------------------

    @abc.abstractmethod
    def _fill(self, gen: Generation, path: str, fill: Fill) -> tuple[Path, Handle]:
        """Make the file at ``path``, which exists and is empty, whole."""

    @abc.abstractmethod
    def _virtual_size(self, fd: int, gen: Generation, path: str) -> int:
        """The size that a guest sees, from an open file of the recorded format.

        :raises IntegrityError: what :meth:`_damaged` makes.
        """

    @abc.abstractmethod
    def _grow(self, gen: Generation, path: str, size: int) -> None:
        """Make the file's virtual size ``size``."""

    def _source(self, gen: Generation) -> FileSource:
        return FileSource(self._path(gen), gen.format)

    @property
    def _qemu_img(self) -> QemuImg:
        return QemuImg(self.conf)

    # --- places --------------------------------------------------------------

    @property
    def _root(self) -> str:
        path: str = self.options.instances_path or os.path.join(
            self.conf.imagebackend.state_path, "instances"
        )
        return os.path.abspath(path)

    def _folder_id(self) -> str | None:
        """The folder's id; None if it has none (yet)."""
        try:
            with open(os.path.join(self._root, _FOLDER_ID), encoding="ascii") as file:
                return file.read().strip() or None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise exc.StorageUnavailable(
                f"backend {self.name!r}: cannot read the id of {self._root}: {error}",
                backend=self.name,
                path=self._root,
            ) from error

    def _ensure_folder(self) -> str:
        """The folder, with an id; returns the scope."""
        folder_id = self._folder_id()
        if folder_id is None:
            os.makedirs(self._root, mode=0o711, exist_ok=True)
            temporary = os.path.join(self._root, f"{_FOLDER_ID}.{uuid.uuid4()}")
            with open(temporary, "x", encoding="ascii") as file:
                file.write(f"{uuid.uuid4()}\n")
                file.flush()
                os.fsync(file.fileno())
            # Another process may be first: then its id counts.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, os.path.join(self._root, _FOLDER_ID))
            os.unlink(temporary)
            fsync_path(self._root)
            folder_id = self._folder_id()
        return f"folder:{folder_id}"

    def _own(self, gen: Generation) -> None:
        """:raises ConfigError, StorageUnavailable: the folder is not the one that
        the generation was recorded in."""
        if gen.scope == _NEW_FOLDER:
            return
        folder_id = self._folder_id()
        if folder_id is None:
            raise exc.StorageUnavailable(
                f"backend {self.name!r}: {self._root} {_NO_ID}: is the file system "
                f"mounted?",
                backend=self.name,
                path=self._root,
            )
        if gen.scope != f"folder:{folder_id}":
            raise exc.ConfigError(
                f"backend {self.name!r}: generation {gen.id} is recorded in "
                f"{gen.scope}, but {self._root} is folder:{folder_id}: point "
                f"[{self.name}] instances_path at the folder that it was made in",
                backend=self.name,
                generation=gen.id,
            )

    def _relative(self, gen: Generation) -> str:
        recorded = gen.handle.get("path")
        if recorded is None:
            name = generic.object_name(gen.disk_name, self._marker(gen))
            recorded = os.path.join(gen.instance_id or gen.disk_id, name)
        parts = str(recorded).split("/")
        if len(parts) != 2 or not all(_SAFE.fullmatch(part) for part in parts):
            raise exc.InternalError(
                f"generation {gen.id} has a handle that is not a path of backend "
                f"{self.name!r}: {recorded!r}",
                generation=gen.id,
            )
        return str(recorded)

    def _path(self, gen: Generation) -> str:
        return os.path.join(self._root, self._relative(gen))

    def _temporaries(self, path: str) -> tuple[str, str]:
        folder, name = os.path.split(path)
        return (
            os.path.join(folder, f".{name}.part"),
            os.path.join(folder, f".{name}.fs"),
        )

    @staticmethod
    def _marker(gen: Generation) -> Marker:
        return Marker(gen.id, gen.deployment_id)

    # --- the contract --------------------------------------------------------

    def check(self) -> Sequence[Finding]:
        root = self._root
        if not can_be_made(root):
            return [
                Finding(
                    Severity.ERROR,
                    self.name,
                    f"{nearest(root)} is no folder that can be written to",
                    f"let this user write there, or set [{self.name}] instances_path",
                )
            ]
        try:
            processes.require("qemu-img", "qemu-utils")
            self._folder_id()
        except exc.ImageBackendError as error:
            return [Finding(Severity.ERROR, self.name, error.message)]
        return [Finding(Severity.OK, self.name, f"disks go to {root}")]

    def plan(self, want: Want) -> Placement:
        generic.refuse_fills(self.name, want, ("Blank", "FromImage", "FromGeneration"))
        if want.pool or want.volume_type:
            what = "pool" if want.pool else "volume type"
            raise exc.PlacementRefused(
                f"backend {self.name!r} has no {what}s: "
                f"{want.pool or want.volume_type!r} cannot be had from it",
                backend=self.name,
            )
        self._refuse(want)
        folder_id = self._folder_id()
        granularity = 512
        return Placement(
            backend=self.name,
            scope=f"folder:{folder_id}" if folder_id else _NEW_FOLDER,
            size=-(-want.size // granularity) * granularity,
            format=self.FORMAT,
            path=self._way(want),
            uses_cache=self._uses_cache(want),
            new="" if folder_id else f"{self._root} {_NO_ID}",
        )

    def _refuse(self, want: Want) -> None:
        """Refuse what this format cannot do."""

    @abc.abstractmethod
    def _way(self, want: Want) -> Path: ...

    def _uses_cache(self, want: Want) -> bool:
        return False

    def create(
        self, gen: Generation, fill: Fill, record: Record, *, auth: Any = None
    ) -> Creation:
        self._own(gen)
        path = self._path(gen)
        # Nothing to record yet: the name follows from the generation.
        try:
            scope = self._ensure_folder()
            os.makedirs(os.path.dirname(path), mode=0o711, exist_ok=True)
            if os.path.lexists(path):
                return self._existing(gen, path, scope)
            with contextlib.ExitStack() as undo:
                undo.callback(self._tidy, path)
                way, handle = self._make(gen, path, fill)
                handle = {"path": self._relative(gen), **handle}
                record(handle)
                self._publish(path)
                undo.pop_all()
        except OSError as error:
            raise processes.space_error(error, path) from error
        return Creation(gen.size, gen.format, way, handle, scope)

    def _make(self, gen: Generation, path: str, fill: Fill) -> tuple[Path, Handle]:
        part = self._temporaries(path)[0]
        # A leftover of the same generation can only be a dead try of our own.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            way, handle = self._fill(gen, part, fill)
            size = self._virtual_size(fd, gen, part)
            if size != gen.size:
                raise exc.IntegrityError(
                    f"backend {self.name!r} made a disk of {size} bytes instead of "
                    f"{gen.size}",
                    generation=gen.id,
                )
            if self.options.preallocate:
                self._preallocate(fd, gen.size)
            os.fsync(fd)
        finally:
            os.close(fd)
        return way, handle

    def _preallocate(self, fd: int, size: int) -> None:
        # Only here, on a file that no guest has: never on an existing disk.
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            LOG.warning(
                "[%s] preallocate: the file system of %s cannot reserve space",
                self.name,
                self._root,
            )

    def _publish(self, path: str) -> None:
        part = self._temporaries(path)[0]
        folder = os.path.dirname(path)
        try:
            os.link(part, path)
        except FileExistsError:
            raise self._foreign(path) from None
        try:
            os.unlink(part)
            fsync_path(folder)
            fsync_path(self._root)
        except BaseException:
            os.unlink(path)
            raise

    def _tidy(self, path: str) -> None:
        """Undo a create: what is temporary, and the instance's folder if empty."""
        for temporary in self._temporaries(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))

    def _existing(self, gen: Generation, path: str, scope: str) -> Creation:
        try:
            found = self._stat_file(gen, path)
        except exc.StorageError:
            found = None
        if found is None or found.size != gen.size:
            raise self._foreign(path)
        self._tidy(path)
        handle = {**gen.handle, "path": self._relative(gen)}
        return Creation(gen.size, gen.format, Path.CLONE, handle, scope)

    def _foreign(self, path: str) -> exc.ObjectExists:
        return exc.ObjectExists(
            f"backend {self.name!r}: {path} exists and is not the disk that was to be "
            f"made there; it was not touched",
            backend=self.name,
            path=path,
        )

    def delete(self, gen: Generation) -> None:
        self._own(gen)
        path = self._path(gen)
        if generic.qemu_has_open(path):
            raise exc.Busy(
                f"{path} is in use by a QEMU process of this host",
                path=path,
                backend=self.name,
            )
        folder = os.path.dirname(path)
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._refuse_folder(path, os.lstat(path).st_mode)
            removed = False
            # A link goes, and not what it points at.
            for name in (path, *self._temporaries(path)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(name)
                    removed = True
            if removed:
                fsync_path(folder)
            with contextlib.suppress(OSError):
                # Only an empty one goes: other disks of the instance stay.
                os.rmdir(folder)
        except OSError as error:
            raise processes.space_error(error, path) from error

    def connect(
        self,
        gen: Generation,
        to: Connector,
        record: Record,
        *,
        readonly: bool = False,
    ) -> Connection:
        if self.stat(gen) is None:
            raise exc.ObjectMissing(
                f"backend {self.name!r}: the disk's file is gone: {self._path(gen)}",
                backend=self.name,
                generation=gen.id,
            )
        record({})
        return Connection(self._source(gen), to.host_id, readonly=readonly)

    def disconnect(self, gen: Generation, conn: Connection) -> None:
        self._own(gen)

    def stat(self, gen: Generation) -> Stat | None:
        self._own(gen)
        return self._stat_file(gen, self._path(gen))

    def _stat_file(self, gen: Generation, path: str) -> Stat | None:
        try:
            mode = os.lstat(path).st_mode
            self._refuse_folder(path, mode)
            if not stat_module.S_ISREG(mode):
                raise self._damaged(gen, path, "it is not a regular file")
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise exc.StorageError(
                f"backend {self.name!r}: cannot open {path}: {error.strerror}",
                path=path,
            ) from error
        try:
            size = self._virtual_size(fd, gen, path)
            if size < gen.size:
                what = f"it has {size} bytes, recorded are {gen.size}"
                raise self._damaged(gen, path, what)
            return Stat(
                size=size,
                allocated=os.fstat(fd).st_blocks * 512,
                used_by=self._used_by(path),
            )
        finally:
            os.close(fd)

    @staticmethod
    def _used_by(path: str) -> Sequence[str]:
        return ("a QEMU process of this host",) if generic.qemu_has_open(path) else ()

    def _damaged(self, gen: Generation, path: str, what: str) -> exc.IntegrityError:
        return exc.IntegrityError(
            f"backend {self.name!r}: the disk's file {path} is damaged: {what}",
            backend=self.name,
            generation=gen.id,
            path=path,
            used_by=self._used_by(path),
        )

    def _refuse_folder(self, path: str, mode: int) -> None:
        if stat_module.S_ISDIR(mode):
            raise exc.ObjectExists(
                f"backend {self.name!r}: {path} is a folder where the disk's file "
                f"should be: look what it has, and move it away",
                backend=self.name,
                path=path,
            )

    def scan(self) -> Iterator[Found]:
        try:
            folders = os.scandir(self._root)
        except FileNotFoundError:
            return
        except OSError as error:
            raise exc.StorageUnavailable(
                f"backend {self.name!r}: cannot list {self._root}: {error.strerror}",
                backend=self.name,
            ) from error
        with folders:
            for folder in folders:
                if folder.name.startswith(_FOLDER_ID):
                    continue
                if not folder.is_dir(follow_symlinks=False):
                    yield Found(folder.name, None)
                    continue
                yield from self._scan_instance(folder)

    def _scan_instance(self, folder: os.DirEntry[str]) -> Iterator[Found]:
        try:
            entries = os.scandir(folder.path)
        except OSError as error:  # one bad folder does not end the audit
            LOG.warning("cannot list %s: %s", folder.path, error)
            return
        with entries:
            for entry in entries:
                relative = f"{folder.name}/{entry.name}"
                marker = generic.marker_of(entry.name)
                handle = {}
                if marker is not None:
                    name = entry.name.removeprefix(".")
                    for suffix in (".part", ".fs"):
                        name = name.removesuffix(suffix)
                    handle = {"path": f"{folder.name}/{name}"}
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    yield Found(relative, marker, handle, facts.st_blocks * 512)

    def capacity(self) -> Sequence[Inventory]:
        probe = nearest(self._root)
        try:
            room = os.statvfs(probe)
        except OSError as error:
            raise exc.StorageUnavailable(
                f"backend {self.name!r}: {probe}: {error.strerror}", backend=self.name
            ) from error
        used = sum(
            found.allocated or 0
            for found in self.scan()
            if found.marker and found.marker.deployment_id == self.deployment_id
        )
        return [
            Inventory(
                backend=self.name,
                provider=f"folder:{self._folder_id() or 'new'}",
                total=room.f_blocks * room.f_frsize,
                free=room.f_bavail * room.f_frsize,
                used_by_us=used,
            )
        ]

    def resize(self, gen: Generation, size: int) -> int:
        found = self.stat(gen)
        path = self._path(gen)
        if found is None:
            raise exc.ObjectMissing(
                f"backend {self.name!r}: the disk's file {path} is not there",
                generation=gen.id,
            )
        wanted = -(-size // 512) * 512
        if found.size >= wanted:
            return found.size
        if generic.qemu_has_open(path):
            raise exc.Busy(
                f"{path} is in use by a QEMU process of this host: let the guest grow "
                f"it",
                path=path,
            )
        try:
            self._grow(gen, path, wanted)
            fsync_path(path)
        except OSError as error:
            raise processes.space_error(error, path) from error
        now = self._stat_file(gen, path)
        return now.size if now else 0

    def capabilities(self, at: Placement | Generation) -> Capabilities:
        raise self._cannot("tell the capabilities of", at.backend)


def blank_file(path: str, size: int, fill: Blank) -> None:
    """A raw file of ``size`` zeros, or with an empty file system."""
    os.truncate(path, size)
    if fill.fs:
        generic.make_filesystem(path, fill.fs, fill.label)
