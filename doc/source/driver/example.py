# SPDX-License-Identifier: Apache-2.0
"""A complete small driver: a folder with a raw file for each generation."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.backends import generic
from imagebackend.backends.base import (
    Backend,
    Blank,
    Fill,
    FromGeneration,
    FromImage,
    Record,
)
from imagebackend.model import (
    Capabilities,
    Connection,
    Connector,
    Creation,
    FileSource,
    Finding,
    Found,
    Generation,
    Inventory,
    Marker,
    Path,
    Placement,
    Severity,
    Source,
    Stat,
    Want,
    Way,
)
from imagebackend.qemu_img import QemuImg


class FlatBackend(Backend):
    """Files named ``<disk>.<generation>.<deployment>``: the name is the marker."""

    OPTIONS: ClassVar[Sequence[cfg.Opt]] = [
        cfg.StrOpt("path", help="Folder of the disks. It must exist."),
    ]

    # --- this storage, and where things are in it -------------------------------

    @property
    def _scope(self) -> str:
        """Which storage this is: another folder under the same name is another."""
        facts = os.stat(self.options.path)
        return f"flat:{facts.st_dev}-{facts.st_ino}"

    def _path(self, gen: Generation) -> str:
        """:raises ConfigError: the generation was recorded in another storage."""
        try:
            scope = self._scope
        except OSError as error:
            # Not "absent": nobody has answered that.
            raise exc.StorageUnavailable(f"{self.name}: {error}") from error
        if gen.scope != scope:
            raise exc.ConfigError(
                f"backend {self.name!r}: generation {gen.id} is recorded in "
                f"{gen.scope}, but [{self.name}] path is {scope}"
            )
        name = generic.object_name(gen.disk_name, Marker(gen.id, gen.deployment_id))
        # What was recorded rules; at first there is only the name to come.
        return os.path.join(str(self.options.path), gen.handle.get("name", name))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Only our exceptions leave a backend."""
        try:
            yield
        except OSError as error:
            raise processes.space_error(error, str(self.options.path)) from error

    def check(self) -> Sequence[Finding]:
        try:
            return [Finding(Severity.OK, self.name, f"disks go to {self._scope}")]
        except (OSError, TypeError) as error:
            return [Finding(Severity.ERROR, self.name, f"path: {error}")]

    def capabilities(self, at: Placement | Generation) -> Capabilities:
        return Capabilities(live_resize=Way.HYPERVISOR, live_snapshot=Way.HYPERVISOR)

    def plan(self, want: Want) -> Placement:
        generic.refuse_fills(self.name, want, ("Blank", "FromImage", "FromGeneration"))
        if want.pool or want.volume_type:
            raise exc.PlacementRefused(
                f"backend {self.name!r} has neither pools nor types: "
                f"{want.pool or want.volume_type!r} cannot be had"
            )
        if want.shareable:
            raise exc.NotSupported(f"backend {self.name!r} has no shareable disks")
        return Placement(
            backend=self.name,
            scope=self._scope,
            size=-(-want.size // 512) * 512,
            format="raw",
            path=Path.BLANK if want.fill == "Blank" else Path.CONVERT,
        )

    # --- the life of a generation -----------------------------------------------

    def create(
        self, gen: Generation, fill: Fill, record: Record, *, auth: Any = None
    ) -> Creation:
        path = self._path(gen)
        part = f"{path}.part"
        handle = {"name": os.path.basename(path)}
        way = Path.BLANK if isinstance(fill, Blank) else Path.CONVERT
        if os.path.exists(path):
            # It may be ours, from a call whose answer was lost.
            if os.path.getsize(path) != gen.size:
                raise exc.ObjectExists(f"{path} is not the disk that was to be made")
            return Creation(gen.size, "raw", way, handle)
        with self._errors(), contextlib.ExitStack() as undo:
            undo.callback(_remove, part)
            _remove(part)  # a dead try of this very generation
            with open(part, "xb") as file:
                file.truncate(gen.size)
                self._fill(part, fill)
                os.fsync(file.fileno())
            record(handle)  # durable before anything depends on it
            try:
                os.link(part, path)  # unlike a rename it never replaces anything
            except FileExistsError:
                raise exc.ObjectExists(f"{path} is in the way") from None
            self._flush()
        return Creation(gen.size, "raw", way, handle)

    def _fill(self, path: str, fill: Fill) -> None:
        match fill:
            case Blank(fs=fs, label=label):
                if fs:
                    generic.make_filesystem(path, fs, label)
            case FromImage(image):
                with image.cached() as cached:
                    self._copy(FileSource(cached.path, cached.format), path)
            case FromGeneration(source=source):
                self._copy(source, path)
            case _:
                raise exc.NotSupported(f"cannot fill by {type(fill).__name__}")

    def _copy(self, source: Source, path: str) -> None:
        target = FileSource(path, "raw")
        QemuImg(self.conf).convert(source, target, target_is_blank=True)

    def delete(self, gen: Generation) -> None:
        path = self._path(gen)
        if generic.qemu_has_open(path):
            raise exc.Busy(f"{path} is in use by a QEMU process of this host")
        with self._errors():
            _remove(f"{path}.part")
            _remove(path)  # absent is success
            self._flush()

    def connect(
        self,
        gen: Generation,
        to: Connector,
        record: Record,
        *,
        readonly: bool = False,
    ) -> Connection:
        if self.stat(gen) is None:
            raise exc.ObjectMissing(f"{self._path(gen)} is not there any more")
        record({})  # nothing is needed to let go of a file
        source = FileSource(self._path(gen), gen.format)
        return Connection(source, to.host_id, readonly=readonly)

    def disconnect(self, gen: Generation, conn: Connection) -> None:
        self._path(gen)

    def resize(self, gen: Generation, size: int) -> int:
        path, wanted = self._path(gen), -(-size // 512) * 512
        found = self.stat(gen)
        if found is None:
            raise exc.ObjectMissing(f"{path} is not there any more")
        if found.size >= wanted:
            return found.size
        if found.used_by:
            raise exc.Busy(f"{path} is in use: the guest has to grow it")
        with self._errors():
            os.truncate(path, wanted)
        return wanted

    # --- what there is ------------------------------------------------------------

    def stat(self, gen: Generation) -> Stat | None:
        path = self._path(gen)
        try:
            facts = os.stat(path)
        except FileNotFoundError:
            return None
        user = ("a QEMU process of this host",)
        return Stat(
            size=facts.st_size,
            allocated=facts.st_blocks * 512,
            used_by=user if generic.qemu_has_open(path) else (),
        )

    def scan(self) -> Iterator[Found]:
        for entry in os.scandir(self.options.path):
            marker = generic.marker_of(entry.name)  # None: not ours
            handle = {"name": entry.name.removesuffix(".part")} if marker else {}
            allocated = entry.stat(follow_symlinks=False).st_blocks * 512
            yield Found(entry.name, marker, handle, allocated)

    def capacity(self) -> Sequence[Inventory]:
        room = os.statvfs(self.options.path)
        ours = (
            found.allocated or 0
            for found in self.scan()
            if found.marker and found.marker.deployment_id == self.deployment_id
        )
        return [
            Inventory(
                backend=self.name,
                provider=self._scope,
                total=room.f_blocks * room.f_frsize,
                free=room.f_bavail * room.f_frsize,
                used_by_us=sum(ours),
            )
        ]

    def _flush(self) -> None:
        fd = os.open(self.options.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
