# SPDX-License-Identifier: Apache-2.0
"""destroy and delete_disk: what is ephemeral goes, what is persistent stays."""

from __future__ import annotations

from imagebackend import exceptions as exc
from imagebackend.actions.context import Context, free, hold
from imagebackend.actions.places import must_answer
from imagebackend.actions.replace import detach, must_be_idle, release
from imagebackend.actions.settle import begin, drop_generation
from imagebackend.model import Change, DiskChange, DiskState, Lifecycle
from imagebackend.store.rows import DiskRow, OwnerRow


def destroy(ctx: Context, instance_id: str) -> Change:
    """See :meth:`imagebackend.manager.DiskManager.destroy`."""
    with ctx.store.reading() as rows:
        # A disk that could not be deleted outlives its instance's row.
        known = rows.instance(instance_id) or rows.owned(instance_id)
        running = rows.operation(instance_id)
    if not known and running is None:
        return Change(instance_id)
    with begin(ctx, "destroy", instance_id) as operation:
        with ctx.store.reading() as rows:
            instance = rows.instance(instance_id)
            owned = rows.owned(instance_id)
            staying = [pair for pair in owned if _stays(rows.owners(pair[1].id), pair)]
            going = [pair for pair in owned if pair not in staying]
            # Of those that a disk has beside its present one; that is asked anyway.
            objects = [
                row
                for _, disk in going
                for row in rows.generations(disk.id)
                if row.id != disk.generation_id
            ]
            handles = {
                disk.id: row.handle
                for _, disk in owned
                if (row := rows.generation(disk.generation_id or "")) is not None
            }
        for owner, disk in owned:
            free(disk, "destroy")
            must_be_idle(ctx, disk, owner, patient=True)
        must_answer(ctx, objects)
        for owner, disk in owned:
            release(ctx, disk, owner)
        # From here on the instance is gone: what dies now is only ever finished.
        with ctx.store.writing() as tx:
            for _, disk in going:
                hold(tx, disk, DiskState.DELETING, operation)
            for owner, disk in staying:
                detach(tx, owner, disk)
            if instance is not None:
                tx.delete(instance)
        for _, disk in going:
            _delete(ctx, disk.id)
        with ctx.store.writing() as tx:
            operation.finish(tx)
    return Change(
        instance_id,
        detached=tuple(
            DiskChange(disk.id, owner.name, disk.size, old=handles.get(disk.id))
            for owner, disk in staying
        ),
        deleted=tuple(
            DiskChange(disk.id, owner.name, old=handles.get(disk.id))
            for owner, disk in going
        ),
    )


def delete_disk(ctx: Context, disk_id: str) -> Change:
    """See :meth:`imagebackend.manager.DiskManager.delete_disk`."""
    with begin(ctx, "delete", disk_id) as operation:
        with ctx.store.reading() as rows:
            disk = rows.disk(disk_id)
            owners = rows.owners(disk_id)
            row = rows.generation(disk.generation_id or "") if disk else None
            objects = rows.generations(disk_id)
        if disk is None:
            raise exc.DiskNotFound(f"disk {disk_id} is not recorded", disk=disk_id)
        if owners:
            who = ", ".join(owner.instance_id for owner in owners)
            raise exc.DiskInUse(
                f"disk {disk_id} belongs to instance {who}: update or destroy the "
                f"instance, a disk is deleted alone only when nobody has it",
                disk=disk_id,
                owners=[owner.instance_id for owner in owners],
            )
        free(disk, "delete")
        must_answer(ctx, objects)
        with ctx.store.writing() as tx:
            hold(tx, disk, DiskState.DELETING, operation)
        _delete(ctx, disk_id)
        with ctx.store.writing() as tx:
            operation.finish(tx)
    old = row.handle if row else None
    return Change(None, deleted=(DiskChange(disk_id, disk.name, old=old),))


def _stays(owners: list[OwnerRow], pair: tuple[OwnerRow, DiskRow]) -> bool:
    return pair[1].lifecycle is Lifecycle.PERSISTENT or len(owners) > 1


def _delete(ctx: Context, disk_id: str) -> None:
    with ctx.store.reading() as rows:
        generations = rows.generations(disk_id)
    for row in generations:
        drop_generation(ctx, row)
    with ctx.store.writing() as tx:
        disk = tx.disk(disk_id)
        if disk is not None:
            tx.delete(*tx.owners(disk_id), disk)
