# SPDX-License-Identifier: Apache-2.0
"""snapshot: the root disk at one point in time, as an image.

A running guest is frozen only for the point in time itself and thawed on every
path; the bytes are exported afterwards.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.actions.context import Context, free, hold, recipe_of, settle_disk
from imagebackend.actions.replace import known_instance, must_be_idle
from imagebackend.actions.settle import begin, drop_generation, drop_snapshot
from imagebackend.backends.base import FromSnapshot
from imagebackend.libvirt.guest import GuestDisks
from imagebackend.model import (
    DiskState,
    GenerationState,
    Handle,
    ImageInfo,
    ProgressCallback,
    Role,
    Snapshot,
    Source,
    UploadTarget,
    Way,
)
from imagebackend.qemu_img import QemuImg
from imagebackend.store.operations import Operation
from imagebackend.store.rows import (
    AttachmentRow,
    DiskRow,
    GenerationRow,
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
    ctx.source.check_target(into)
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
        path = os.path.join(operation.workdir(), f"{disk.id}.{into.disk_format}")
        if guest is None:
            must_be_idle(ctx, disk, owner)
            with _connected(ctx, operation, row, owner) as source:
                _export(ctx, source, path, into, progress)
        else:
            _running(ctx, operation, guest, disk, owner, row, path, into, progress)
        info = ctx.source.put(into, path, operation.id, progress=progress)
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


def _export(
    ctx: Context,
    source: Source,
    path: str,
    into: UploadTarget,
    progress: ProgressCallback | None,
) -> None:
    QemuImg(ctx.conf).convert_to_file(
        source, path, into.disk_format, progress=progress, what="snapshot"
    )


def _running(
    ctx: Context,
    operation: Operation,
    guest: GuestDisks,
    disk: DiskRow,
    owner: OwnerRow,
    row: GenerationRow,
    path: str,
    into: UploadTarget,
    progress: ProgressCallback | None,
) -> None:
    way = ctx.backend(row).capabilities(ctx.generation(row)).live_snapshot
    quiesce = recipe_of(disk).quiesce
    if way is Way.HYPERVISOR:
        guest.backup(
            {disk.id: path}, into.disk_format, quiesce=quiesce, progress=progress
        )
    elif way is Way.STORAGE:
        with guest.frozen(quiesce=quiesce):
            taken = _storage_snapshot(ctx, operation, row)
        with _snapshot_source(ctx, operation, row, owner, taken) as source:
            _export(ctx, source, path, into, progress)
        drop_snapshot(ctx, taken.id)
    else:
        raise exc.NotSupported(
            f"backend {row.backend!r} cannot take a snapshot of disk {owner.name!r} "
            f"while its guest runs: stop the guest first",
            disk=disk.id,
        )


@contextlib.contextmanager
def _connected(
    ctx: Context, operation: Operation, row: GenerationRow, owner: OwnerRow
) -> Iterator[Source]:
    """The generation's source on this host; connected for the block if need be."""
    with ctx.store.writing() as tx:
        mine = [each for each in tx.attachments(row.id) if each.host_id == ctx.host.id]
        if mine:
            attachment = mine[0]
        else:
            attachment = AttachmentRow(
                row.id,
                ctx.host.id,
                owner.instance_id,
                {},
                operation_id=operation.id,
                readonly=True,
            )
            tx.insert(attachment)
    try:
        yield ctx.connect(row, attachment).source
    finally:
        if not mine:
            ctx.disconnect(attachment)


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
) -> Iterator[Source]:
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
        scope=row.scope,
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
