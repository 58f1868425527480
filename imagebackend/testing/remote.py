# SPDX-License-Identifier: Apache-2.0
"""A slow remote storage, for tests: what a driver has to cope with, in one folder.

The server assigns ids late, makes volumes in whole GiB and in its own time, may end in
an error, keeps one attachment a host, has types that differ in what they can do, and
reports another format after a snapshot of a file-based type. Its answers can get lost
(:class:`Faults`): the work is done then, and the client does not know.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import tenacity
from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.backends import generic
from imagebackend.backends.base import (
    Backend,
    Blank,
    Fill,
    FromGeneration,
    FromImage,
    FromSnapshot,
    Record,
)
from imagebackend.model import (
    Capabilities,
    Connection,
    Connector,
    Copyable,
    Creation,
    Fenced,
    FileSource,
    Finding,
    Found,
    Generation,
    GiB,
    Handle,
    Inventory,
    Marker,
    Path,
    Placement,
    Severity,
    Snapshot,
    Stat,
    Want,
    Way,
)
from imagebackend.qemu_img import QemuImg
from imagebackend.testing.remote_server import Faults, Server, Volume

__all__ = ["TYPES", "Faults", "SlowRemoteBackend"]

T = TypeVar("T")

#: What each volume type can do.
TYPES = {
    "fast": Capabilities(
        live_resize=Way.STORAGE,
        live_snapshot=Way.STORAGE,
        shareable=True,
        snapshot=True,
        revert=True,
        reimage=True,
        fence=True,
        granularity=GiB,
    ),
    "file": Capabilities(
        live_snapshot=Way.HYPERVISOR,
        snapshot=True,
        granularity=GiB,
        formats=("raw", "qcow2"),
    ),
    "plain": Capabilities(granularity=GiB),
}
#: Bytes that a volume of a type may have at most, where there is a limit.
_LARGEST = {"plain": 8 * GiB}
_TRIES = 5
_WAIT = 0.01
_DEADLINE = 30


class SlowRemoteBackend(Backend):
    """Volumes of a remote server, reached as files of this host."""

    VOLUME_TYPES = True
    TWINS = True
    OPTIONS: ClassVar[Sequence[cfg.Opt]] = [
        cfg.StrOpt("folder", help="Folder of the server."),
        cfg.FloatOpt("delay", default=0.02, help="Seconds that it takes to create."),
        cfg.StrOpt(
            "default_type", default="fast", help="Type where none is asked for."
        ),
    ]

    @property
    def _server(self) -> Server:
        return Server(self.options.folder, self.options.delay)

    @property
    def _scope(self) -> str:
        return f"remote:{self._server.id}"

    # --- places ----------------------------------------------------------------

    def check(self) -> Sequence[Finding]:
        try:
            self._server.find_all(None)
        except exc.ImageBackendError as error:
            return [Finding(Severity.ERROR, self.name, error.message)]
        return [Finding(Severity.OK, self.name, f"{self._scope} answers")]

    def capabilities(self, at: Placement | Generation) -> Capabilities:
        return TYPES[self._type(at.handle)]

    def volume_types(self, project_id: str) -> Sequence[str]:
        return list(TYPES)

    def _type(self, handle: Handle) -> str:
        return str(handle.get("type") or self.options.default_type)

    def plan(self, want: Want) -> Placement:
        able = ("Blank", "FromImage", "FromGeneration", "FromSnapshot")
        generic.refuse_fills(self.name, want, able)
        type_ = want.volume_type or self.options.default_type
        if type_ not in TYPES:
            raise exc.PlacementRefused(
                f"backend {self.name!r} has no volume type {type_!r}: there are "
                f"{', '.join(TYPES)}",
                volume_type=type_,
                accepted=list(TYPES),
            )
        if want.pool:
            raise exc.PlacementRefused(
                f"backend {self.name!r} has no pools: {want.pool!r} cannot be had",
                pool=want.pool,
            )
        if want.shareable and not TYPES[type_].shareable:
            raise exc.NotSupported(
                f"volumes of type {type_!r} cannot be shareable: use fast"
            )
        size = -(-want.size // GiB) * GiB
        if size > _LARGEST.get(type_, size):
            raise exc.SizeRefused(
                f"volumes of type {type_!r} have at most {_LARGEST[type_]} bytes"
            )
        path = Path.BLANK if want.fill == "Blank" else Path.CONVERT
        return Placement(
            self.name, self._scope, size, "raw", path, handle={"type": type_}
        )

    def _own(self, gen: Generation) -> None:
        if gen.scope != self._scope:
            raise exc.ConfigError(
                f"backend {self.name!r}: generation {gen.id} is recorded in "
                f"{gen.scope}, but [{self.name}] folder is that of {self._scope}",
                generation=gen.id,
            )

    # --- requests ----------------------------------------------------------------

    def _again(self, request: Callable[[], T]) -> T:
        """A request that may be sent twice, until there is an answer."""
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(exc.StorageUnavailable),
            stop=tenacity.stop_after_attempt(_TRIES),
            wait=tenacity.wait_fixed(_WAIT),
            reraise=True,
        )(request)

    def _mine(self, gen: Generation) -> list[Volume]:
        """Volumes with this generation's marker, the recorded one or else the oldest
        first."""
        found = self._again(lambda: self._server.find_all(_marker(gen)))
        recorded = gen.handle.get("id")
        return sorted(found, key=lambda each: (each.id != recorded, each.created))

    def _volume(self, gen: Generation) -> Volume:
        found = self._mine(gen)
        if not found:
            raise exc.ObjectMissing(
                f"backend {self.name!r}: there is no volume of generation {gen.id}",
                generation=gen.id,
            )
        return found[0]

    # --- create and delete ----------------------------------------------------------

    def create(
        self, gen: Generation, fill: Fill, record: Record, *, auth: Any = None
    ) -> Creation:
        self._own(gen)
        found = self._mine(gen)
        with contextlib.ExitStack() as undo:
            if not found:
                undo.callback(self._remove, gen)
            volume = found[0] if found else self._request(gen)
            handle = {**gen.handle, "id": volume.id}
            record(handle)
            self._wait(volume)
            self._drop_twins(gen, volume.id)
            way = Path.CLONE if volume.filled else self._fill(gen, volume, fill)
            # A request whose answer was lost may have been carried out only now.
            self._drop_twins(gen, volume.id)
            undo.pop_all()
        return Creation(volume.size, "raw", way, handle)

    def _request(self, gen: Generation) -> Volume:
        """Ask for a volume once; after a lost answer, look before asking again."""
        for last in range(_TRIES):
            try:
                return self._server.create(
                    _marker(gen), gen.size, self._type(gen.handle)
                )
            except exc.StorageUnavailable:
                found = self._mine(gen)
                if found:
                    return found[0]
                if last == _TRIES - 1:
                    raise
                time.sleep(_WAIT)
        raise AssertionError("not reached")

    def _wait(self, volume: Volume) -> None:
        deadline = time.monotonic() + _DEADLINE
        while True:
            now = self._again(lambda: self._server.get(volume.id))
            if now is None:
                raise exc.ObjectMissing(f"volume {volume.id} has gone")
            if now.status == "available":
                return
            if now.status == "error":
                raise exc.StorageError(
                    f"backend {self.name!r} could not make a volume: {now.reason}",
                    reason=now.reason,
                )
            if time.monotonic() > deadline:
                raise exc.StorageUnavailable(f"volume {volume.id} is still being made")
            time.sleep(_WAIT)

    def drop_twins(self, gen: Generation, recorded: Sequence[Handle]) -> int:
        return self._drop_twins(gen, str(gen.handle["id"]))

    def _drop_twins(self, gen: Generation, keep: str) -> int:
        twins = [each for each in self._mine(gen) if each.id != keep]
        for twin in twins:
            self._again(functools.partial(self._server.delete, twin.id))
        return len(twins)

    def _fill(self, gen: Generation, volume: Volume, fill: Fill) -> Path:
        target = self._server.path(volume)
        way = Path.CONVERT
        match fill:
            case Blank():
                way = Path.BLANK
                if fill.fs:
                    generic.make_filesystem(target, fill.fs, fill.label)
            case FromImage(image):
                with image.cached() as cached:
                    self._copy(FileSource(cached.path, cached.format), target)
            case FromGeneration(source=source):
                self._copy(source, target)
            case FromSnapshot(_, snapshot):
                self._copy(self._server.snapshot_source(snapshot.id), target)
            case _:
                raise exc.NotSupported(
                    f"backend {self.name!r} cannot fill by {type(fill).__name__}"
                )
        self._again(lambda: self._server.filled(volume.id))
        return way

    def _copy(self, source: Copyable, target: str, *, blank: bool = True) -> None:
        QemuImg(self.conf).convert(
            source, FileSource(target, "raw"), target_is_blank=blank
        )

    def delete(self, gen: Generation) -> None:
        self._own(gen)
        self._remove(gen)

    def _remove(self, gen: Generation) -> None:
        for each in self._mine(gen):
            if each.attachments:
                raise exc.Busy(
                    f"volume {each.id} is attached to host "
                    f"{', '.join(each.attachments)}",
                    hosts=list(each.attachments),
                )
            self._again(functools.partial(self._server.delete, each.id))

    # --- connect -----------------------------------------------------------------

    def connect(
        self,
        gen: Generation,
        to: Connector,
        record: Record,
        *,
        readonly: bool = False,
    ) -> Connection:
        self._own(gen)
        volume = self._volume(gen)
        attachment = self._again(
            lambda: self._server.attach(volume.id, to.host_id, gen.shareable)
        )
        handle = {"attachment": attachment, "host": to.host_id}
        record(handle)
        # The format that it has now: it changes with a snapshot of some types.
        source = self._again(lambda: self._server.source(volume.id))
        return Connection(source, to.host_id, handle, readonly)

    def disconnect(self, gen: Generation, conn: Connection) -> None:
        self._own(gen)
        host = conn.handle.get("host", conn.host_id)
        if host != conn.host_id:
            raise exc.HostConflict(
                f"the attachment is of host {host}, not of {conn.host_id}", host=host
            )
        for each in self._mine(gen):
            self._again(functools.partial(self._server.detach, each.id, host))

    # --- what there is -------------------------------------------------------------

    def stat(self, gen: Generation) -> Stat | None:
        self._own(gen)
        found = self._mine(gen)
        if not found:
            return None
        volume = found[0]
        # An attachment is not a guest that has it open.
        return Stat(volume.size, self._server.allocated(volume))

    def scan(self) -> Iterator[Found]:
        for volume in self._again(lambda: self._server.find_all(None)):
            marker = None
            if volume.marker is not None:
                generation, _, deployment = volume.marker.partition("/")
                marker = Marker(generation, deployment)
            yield Found(
                volume.id,
                marker,
                {"id": volume.id, "type": volume.type},
                self._server.allocated(volume),
            )

    def capacity(self) -> Sequence[Inventory]:
        room = os.statvfs(self.options.folder)
        used = sum(
            self._server.allocated(volume)
            for volume in self._again(lambda: self._server.find_all(None))
            if volume.marker and volume.marker.endswith(f"/{self.deployment_id}")
        )
        return [
            Inventory(
                self.name,
                self._scope,
                room.f_blocks * room.f_frsize,
                room.f_bavail * room.f_frsize,
                used,
            )
        ]

    # --- optional --------------------------------------------------------------------

    def _can(self, gen: Generation, what: str) -> None:
        if not getattr(self.capabilities(gen), what):
            raise self._cannot(what, gen.id)

    def resize(self, gen: Generation, size: int) -> int:
        self._own(gen)
        volume = self._volume(gen)
        wanted = max(-(-size // GiB) * GiB, volume.size)
        if volume.attachments and self.capabilities(gen).live_resize is Way.NONE:
            raise exc.Busy(
                f"volume {volume.id} is attached, and type {volume.type!r} grows only "
                f"when it is not"
            )
        return self._again(lambda: self._server.extend(volume.id, wanted))

    def snapshot(self, gen: Generation, snap_id: str, record: Record) -> Snapshot:
        self._own(gen)
        self._can(gen, "snapshot")
        volume = self._volume(gen)
        record({"volume": volume.id})
        self._again(
            lambda: self._server.snapshot(
                volume.id, snap_id, overlay=volume.type == "file"
            )
        )
        return Snapshot(snap_id, gen.id, volume.size, {"volume": volume.id})

    def delete_snapshot(self, gen: Generation, snap: Snapshot) -> None:
        self._can(gen, "snapshot")
        self._again(lambda: self._server.delete_snapshot(snap.id))

    def revert(self, gen: Generation, snap: Snapshot) -> None:
        self._can(gen, "revert")
        volume = self._volume(gen)
        self._again(lambda: self._server.revert(volume.id, snap.id))

    def reimage(self, gen: Generation, fill: FromImage) -> None:
        self._can(gen, "reimage")
        target = self._server.path(self._volume(gen))
        with fill.image.cached() as cached:
            os.truncate(target, 0)
            os.truncate(target, gen.size)
            self._copy(FileSource(cached.path, cached.format), target)

    def fence(self, gen: Generation, host_id: str, conn: Connection) -> Fenced:
        if not self.capabilities(gen).fence:
            return Fenced.NOT_POSSIBLE
        volume = self._volume(gen)
        self._again(lambda: self._server.block(volume.id, host_id))
        return Fenced.CUT

    def adopt(self, ref: str, gen: Generation, record: Record) -> Creation:
        self._own(gen)
        volume = self._again(lambda: self._server.mark(ref, _marker(gen)))
        handle = {"id": volume.id, "type": volume.type}
        record(handle)
        return Creation(volume.size, gen.format, Path.CLONE, handle)


def _marker(gen: Generation) -> str:
    return f"{gen.id}/{gen.deployment_id}"
