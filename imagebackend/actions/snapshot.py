# SPDX-License-Identifier: Apache-2.0
"""snapshot: the root disk at one point in time, as an image.

A running guest is frozen only for the point in time itself and thawed on every
path; the bytes are exported afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Iterator

from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.actions.context import (
    Context,
    free,
    hold,
    instance_of,
    recipe_of,
    settle_disk,
)
from imagebackend.actions.replace import known_instance, must_be_idle
from imagebackend.actions.settle import begin, drop_generation, drop_snapshot
from imagebackend.backends.base import FromSnapshot
from imagebackend.images.base import ImageSource
from imagebackend.libvirt.guest import GuestDisks
from imagebackend.model import (
    Copyable,
    DiskState,
    GenerationState,
    Handle,
    ImageInfo,
    ProgressCallback,
    Role,
    Snapshot,
    UploadTarget,
    Way,
)
from imagebackend.qemu_img import QemuImg
from imagebackend.store.operations import Operation
from imagebackend.store.rows import (
    DiskRow,
    GenerationRow,
    InstanceRow,
    OwnerRow,
    SnapshotRow,
)

LOG = log.getLogger(__name__)
_FORMATS = ("qcow2", "raw")


def snapshot(
    ctx: Context,
    instance_id: str,
    into: UploadTarget,
    guest: GuestDisks | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> ImageInfo:
    """See :meth:`imagebackend.manager.DiskManager.snapshot`."""
    if into.disk_format not in _FORMATS:
        raise exc.InvalidValue(
            "format of the image", into.disk_format, "one of " + ", ".join(_FORMATS)
        )
    source = ctx.source_of(into.source)
    source.check_target(into)
    with ctx.store.reading() as rows:
        into = _complete(into, known_instance(rows, instance_id))
    detail = {"into": model.dumps(into)}
    if guest is not None:
        detail["domain"] = guest.uuid
    with begin(ctx, "snapshot", instance_id, **detail) as operation:
        with ctx.store.reading() as rows:
            known_instance(rows, instance_id)
            owner, disk = _root(instance_id, rows.owned(instance_id))
            row = rows.generation(disk.generation_id or "")
        if row is None:
            raise exc.InternalError(f"disk {disk.id} has no object")
        free(disk, "snapshot")
        with ctx.store.writing() as tx:
            held = hold(tx, disk, DiskState.SNAPSHOTTING, operation)
        if not into.min_disk:
            into = dataclasses.replace(into, min_disk=disk.size)
        work = _Work(ctx, operation, disk, owner, row, into, source, progress)
        if guest is None:
            must_be_idle(ctx, disk, owner)
            info = work.stopped()
        else:
            info = work.running(guest)
        with ctx.store.writing() as tx:
            settle_disk(tx, held)
            operation.finish(tx)
    return info


def _root(
    instance_id: str, owned: list[tuple[OwnerRow, DiskRow]]
) -> tuple[OwnerRow, DiskRow]:
    for owner, disk in owned:
        if disk.role is Role.ROOT:
            return owner, disk
    raise exc.DiskNotFound(
        f"instance {instance_id} has no root disk to take a snapshot of",
        instance=instance_id,
    )


def _complete(into: UploadTarget, instance: InstanceRow) -> UploadTarget:
    """With what Nova's snapshots say of themselves as well; the caller's word wins."""
    request = instance_of(instance.request)
    says = {"image_type": "snapshot", "instance_uuid": request.id}
    if request.image:
        says["base_image_ref"] = request.image
    return dataclasses.replace(
        into,
        properties={**says, **into.properties},
        owner=into.owner or request.project_id,
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """One snapshot, by the way that the backend has for it."""

    ctx: Context
    operation: Operation
    disk: DiskRow
    owner: OwnerRow
    row: GenerationRow
    into: UploadTarget
    target: ImageSource
    progress: ProgressCallback | None

    def stopped(self) -> ImageInfo:
        if self._can_publish():
            return self._of_storage_snapshot(contextlib.nullcontext())
        with _connected(self.ctx, self.operation, self.row, self.owner) as source:
            return self._upload(self._export(source))

    def running(self, guest: GuestDisks) -> ImageInfo:
        ctx, row = self.ctx, self.row
        way = ctx.backend(row).capabilities(ctx.generation(row)).live_snapshot
        quiesce = recipe_of(self.disk).quiesce
        if way is Way.HYPERVISOR:
            path = self._path()
            guest.backup(
                {self.disk.id: path},
                self.into.disk_format,
                quiesce=quiesce,
                progress=self.progress,
            )
            return self._upload(path)
        if way is Way.STORAGE:
            return self._of_storage_snapshot(guest.frozen(quiesce=quiesce))
        raise exc.NotSupported(
            f"backend {row.backend!r} cannot take a snapshot of disk "
            f"{self.owner.name!r} while its guest runs: stop the guest first",
            disk=self.disk.id,
        )

    def _can_publish(self) -> bool:
        row = self.row
        can = self.ctx.backend(row).capabilities(self.ctx.generation(row))
        same = self.into.disk_format == row.format
        return self.target.takes_locations and same and can.snapshot

    def _of_storage_snapshot(
        self, frozen: contextlib.AbstractContextManager[None]
    ) -> ImageInfo:
        ctx, row = self.ctx, self.row
        with frozen:
            taken = _storage_snapshot(ctx, self.operation, row)
        location = None
        if self._can_publish():
            location = ctx.backend(row).publish(ctx.generation(row), taken, self.into)
        if location is not None:
            info = self.target.register(self.into, location, self.operation.id)
        else:
            with _snapshot_source(
                ctx, self.operation, row, self.owner, taken
            ) as source:
                path = self._export(source)
            info = self._upload(path)
        drop_snapshot(ctx, taken.id)
        return info

    def _path(self) -> str:
        name = f"{self.disk.id}.{self.into.disk_format}"
        return os.path.join(self.operation.workdir(), name)

    def _export(self, source: Copyable) -> str:
        path = self._path()
        QemuImg(self.ctx.conf).convert_to_file(
            source,
            path,
            self.into.disk_format,
            progress=self.progress,
            what="snapshot",
        )
        return path

    def _upload(self, path: str) -> ImageInfo:
        return self.target.put(
            self.into, path, self.operation.id, progress=self.progress
        )


@contextlib.contextmanager
def _connected(
    ctx: Context, operation: Operation, row: GenerationRow, owner: OwnerRow
) -> Iterator[Copyable]:
    """The generation on this host; connected for the block if need be."""
    with ctx.store.reading() as rows:
        attached = rows.attachments(row.id)
    mine = [each for each in attached if each.host_id == ctx.host.id]
    if mine:
        yield ctx.copyable(row, ctx.connect(row, mine[0]))
    else:
        with ctx.borrowed(row, operation.id, owner.instance_id) as source:
            yield source


def _storage_snapshot(
    ctx: Context, operation: Operation, row: GenerationRow
) -> Snapshot:
    record_row = SnapshotRow(
        str(uuid.uuid4()), row.id, row.size, {}, operation_id=operation.id
    )
    with ctx.store.writing() as tx:
        tx.insert(record_row)

    def record(handle: Handle) -> None:
        with ctx.store.writing() as tx:
            tx.update_snapshot(record_row.id, handle=dict(handle))

    taken = ctx.backend(row).snapshot(ctx.generation(row), record_row.id, record)
    record(taken.handle)
    return taken


@contextlib.contextmanager
def _snapshot_source(
    ctx: Context,
    operation: Operation,
    row: GenerationRow,
    owner: OwnerRow,
    taken: Snapshot,
) -> Iterator[Copyable]:
    """A temporary generation made from the snapshot, connected for the block."""
    temporary = GenerationRow(
        id=str(uuid.uuid4()),
        disk_id=None,
        disk_name=row.disk_name,
        instance_id=row.instance_id,
        project_id=row.project_id,
        host_id=ctx.host.id,
        state=GenerationState.DEBT,
        operation_id=operation.id,
        backend=row.backend,
        scope=ctx.backend(row).scope_of_copies(ctx.generation(row)),
        size=taken.size,
        format=row.format,
        handle={},
    )
    with ctx.store.writing() as tx:
        tx.insert(temporary)
    ctx.backend(row).create(
        ctx.generation(temporary),
        FromSnapshot(ctx.generation(row), taken),
        ctx.recorder(temporary),
    )
    with ctx.store.reading() as rows:
        made = rows.generation(temporary.id) or temporary
    with _connected(ctx, operation, made, owner) as source:
        yield source
    drop_generation(ctx, made)
