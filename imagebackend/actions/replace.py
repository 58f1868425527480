# SPDX-License-Identifier: Apache-2.0
"""rebuild and update: disks are made anew beside the old ones, then switched.

The switch of all disks of an instance is one transaction. Before it the old
generations are the disks and the new ones are undone; after it the old ones are
debts and are purged.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, cast

from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.actions.context import (
    IN_PLACE,
    Context,
    free,
    hold,
    instance_of,
    recipe_of,
    settle_disk,
    specs_of,
)
from imagebackend.actions.create import Batch, create, request_text
from imagebackend.actions.places import must_be_whole, place
from imagebackend.actions.settle import begin, drop_generation, pay_debts
from imagebackend.backends.base import FromImage
from imagebackend.model import (
    Change,
    DiskChange,
    DiskSpec,
    DiskState,
    GenerationState,
    Handle,
    ImageInfo,
    InPlace,
    Instance,
    Lifecycle,
    ProgressCallback,
)
from imagebackend.selection import Recipe, Wanted
from imagebackend.store.operations import Operation
from imagebackend.store.rows import (
    DiskRow,
    GenerationRow,
    InstanceRow,
    OwnerRow,
    Transaction,
)
from imagebackend.validation import file_size

LOG = log.getLogger(__name__)
Present = list[tuple[OwnerRow, DiskRow]]


@dataclasses.dataclass
class _Steps:
    """What is to happen to each disk of an instance."""

    create: list[Wanted] = dataclasses.field(default_factory=list)
    recreate: list[tuple[OwnerRow, DiskRow, Recipe, ImageInfo | None]] = (
        dataclasses.field(default_factory=list)
    )
    in_place: list[tuple[OwnerRow, DiskRow, Recipe, ImageInfo | None]] = (
        dataclasses.field(default_factory=list)
    )
    grow: list[tuple[OwnerRow, DiskRow, Recipe]] = dataclasses.field(
        default_factory=list
    )
    keep: Present = dataclasses.field(default_factory=list)
    delete: Present = dataclasses.field(default_factory=list)
    detach: Present = dataclasses.field(default_factory=list)

    def move_in_place(
        self, ctx: Context, when: InPlace
    ) -> list[tuple[OwnerRow, DiskRow, Recipe, ImageInfo | None]]:
        """Disks that are to be re-created, and that the operator wants filled where
        they are: of the same size and in the same place."""
        moved = [each for each in self.recreate if _stays(ctx, *each[1:], when)]
        self.recreate = [each for each in self.recreate if each not in moved]
        self.in_place += moved
        return moved


def _stays(
    ctx: Context, disk: DiskRow, recipe: Recipe, image: ImageInfo | None, when: InPlace
) -> bool:
    present = recipe_of(disk)
    same = dataclasses.replace(present, image=recipe.image, quiesce=recipe.quiesce)
    if image is None or same != recipe or disk.shareable:
        return False
    row = _object(ctx, disk)
    found = ctx.backend(row).capabilities(ctx.generation(row))
    return found.reimage and found.in_place is when


def taint(ctx: Context, instance_id: str) -> None:
    """The next ``update`` re-creates all ephemeral disks."""
    with ctx.store.writing() as tx:
        tx.update_instance(known_instance(tx, instance_id), tainted=True)


def rebuild(
    ctx: Context,
    instance: Instance,
    *,
    auth: Any = None,
    progress: ProgressCallback | None = None,
) -> Change:
    """See :meth:`imagebackend.manager.DiskManager.rebuild`."""
    with ctx.store.reading() as rows:
        before = known_instance(rows, instance.id)
    recorded = instance_of(before.request)
    if instance.flavor != recorded.flavor and instance.flavor is not None:
        raise exc.Conflict(
            f"instance {instance.id}: a rebuild cannot change the flavor; use resize",
            instance=instance.id,
        )
    instance = dataclasses.replace(recorded, image=instance.image or recorded.image)
    new_root = (
        ctx.image(instance.image, instance.project_id, auth) if instance.image else None
    )
    with begin(ctx, "rebuild", instance.id) as operation:
        row, present = _present(ctx, instance.id, "rebuild")
        steps = _Steps()
        for owner, disk in present:
            if disk.lifecycle is Lifecycle.PERSISTENT or disk.shareable:
                steps.keep.append((owner, free(disk, "keep")))
                continue
            recipe = recipe_of(disk)
            if recipe.role is model.Role.ROOT and new_root is not None:
                recipe = dataclasses.replace(recipe, image=new_root.id)
                _must_fit(disk, new_root)
            if recipe.path is not None:
                file_size(f"path of disk {owner.name!r}", recipe.path)
            image = _image_of(ctx, recipe, instance, new_root, auth)
            steps.recreate.append((owner, disk, recipe, image))
        disks = specs_of(row.request)
        return _apply(
            ctx,
            operation,
            row,
            instance,
            steps,
            request_text(instance, disks),
            auth,
            progress,
        )


def update(
    ctx: Context,
    instance: Instance,
    disks: Sequence[DiskSpec],
    *,
    auth: Any = None,
    progress: ProgressCallback | None = None,
) -> Change:
    """See :meth:`imagebackend.manager.DiskManager.update`."""
    with ctx.store.reading() as rows:
        absent = rows.instance(instance.id) is None
    if absent:
        return create(ctx, instance, disks, auth=auth, progress=progress)
    wanted = ctx.selection(auth).wanted(instance, disks)
    with begin(ctx, "update", instance.id) as operation:
        row, present = _present(ctx, instance.id, "update")
        steps = _compare(ctx, row, wanted, present)
        return _apply(
            ctx,
            operation,
            row,
            instance,
            steps,
            request_text(instance, disks),
            auth,
            progress,
        )


def known_instance(rows: Any, instance_id: str) -> InstanceRow:
    row: InstanceRow | None = rows.instance(instance_id)
    if row is None:
        raise exc.InstanceNotFound(
            f"instance {instance_id} has no recorded disks", instance=instance_id
        )
    return row


def _image_of(
    ctx: Context,
    recipe: Recipe,
    instance: Instance,
    root: ImageInfo | None,
    auth: Any,
) -> ImageInfo | None:
    if recipe.image is None:
        return None
    image = root
    if image is None or image.id != recipe.image:
        image = ctx.image(recipe.image, instance.project_id, auth)
    return ctx.selection(auth).located(image, recipe.backend)


def _must_fit(disk: DiskRow, image: ImageInfo) -> None:
    needed = max(image.virtual_size or 0, image.min_disk_gb * model.GiB)
    if needed > disk.size:
        raise exc.SizeRefused(
            f"image {image.id} needs {needed} bytes, disk {disk.name!r} has "
            f"{disk.size}",
            image=image.id,
            size=disk.size,
            needed=needed,
        )


def _present(ctx: Context, instance_id: str, verb: str) -> tuple[InstanceRow, Present]:
    with ctx.store.reading() as rows:
        row = known_instance(rows, instance_id)
        present = rows.owned(instance_id)
    for _, disk in present:
        free(disk, verb)
    return row, present


def _compare(
    ctx: Context, row: InstanceRow, wanted: Sequence[Wanted], present: Present
) -> _Steps:
    steps = _Steps()
    by_name = {owner.name: (owner, disk) for owner, disk in present}
    for each in wanted:
        found = by_name.pop(each.name, None)
        if found is None:
            steps.create.append(each)
            continue
        owner, disk = found
        if each.recipe is None:
            if disk.id != each.disk_id:
                raise exc.Conflict(
                    f"disk {each.name!r} of instance {row.id} is {disk.id}, not "
                    f"{each.disk_id}: give the existing disk another name",
                    disk=disk.id,
                )
            steps.keep.append(found)
            continue
        _compare_one(steps, row, owner, disk, each)
    for owner, disk in by_name.values():
        leaves = disk.lifecycle is Lifecycle.PERSISTENT or _shared(ctx, disk)
        (steps.detach if leaves else steps.delete).append((owner, disk))
    return steps


def _compare_one(
    steps: _Steps, row: InstanceRow, owner: OwnerRow, disk: DiskRow, each: Wanted
) -> None:
    assert each.recipe is not None
    present = recipe_of(disk)
    # Where it lies was recorded and rules; a changed default moves nothing.
    recipe = each.recipe
    if each.why == "host":
        recipe = dataclasses.replace(
            recipe,
            backend=present.backend,
            pool=present.pool,
            volume_type=present.volume_type,
        )
    same = present.same_content(recipe)
    if disk.lifecycle is Lifecycle.PERSISTENT or disk.shareable:
        if not same or recipe.size < present.size:
            raise exc.Conflict(
                f"disk {owner.name!r} of instance {row.id} is {disk.lifecycle} and "
                f"exists with other properties: it is never re-created; give the new "
                f"one another name",
                disk=disk.id,
            )
    elif row.tainted or not same or recipe.size < present.size:
        steps.recreate.append((owner, disk, recipe, each.image))
        return
    if recipe.size > present.size:
        steps.grow.append((owner, disk, recipe))
    else:
        steps.keep.append((owner, disk))


def _shared(ctx: Context, disk: DiskRow) -> bool:
    with ctx.store.reading() as rows:
        return len(rows.owners(disk.id)) > 1


def _apply(
    ctx: Context,
    operation: Operation,
    row: InstanceRow,
    instance: Instance,
    steps: _Steps,
    request: str,
    auth: Any,
    progress: ProgressCallback | None,
) -> Change:
    leaving = [
        *((owner, disk) for owner, disk, _, _ in steps.recreate),
        *steps.delete,
    ]
    steps.move_in_place(ctx, InPlace.ALWAYS)
    growing = [(owner, disk) for owner, disk, _ in steps.grow]
    for owner, disk in [*leaving, *steps.detach, *growing]:
        must_be_idle(ctx, disk, owner, patient=True)
    must_be_whole(ctx, [_object(ctx, disk) for _, disk in growing])
    # Names and devices of what leaves are taken until it has left.
    present = [*steps.keep, *growing, *leaving, *steps.detach]
    batch = Batch(ctx, operation, instance, auth, progress)
    placements = batch.place(steps.create)
    selection = ctx.selection(auth)
    replacements = [
        place(ctx, selection, recipe, instance, image)
        for _, _, recipe, image in steps.recreate
    ]
    for _, _, recipe, image in steps.in_place:
        place(ctx, selection, recipe, instance, image)
    old = {disk.id: _handle(ctx, disk) for _, disk in leaving}
    with ctx.store.writing() as tx:
        batch.announce(tx, steps.create, placements, present)
        for (owner, disk, recipe, image), placement in zip(
            steps.recreate, replacements, strict=True
        ):
            hold(tx, disk, DiskState.REPLACING, operation)
            batch.replace(tx, owner, disk, recipe, image, placement)
    made = _make(ctx, batch, steps, operation)
    # Last, since these are the things that cannot be taken back.
    grown = [_grow(ctx, operation, *each) for each in steps.grow]
    for owner, disk in [*leaving, *steps.detach]:
        release(ctx, disk, owner)
    made += tuple(
        _fill_in_place(ctx, operation, *each, auth, progress) for each in steps.in_place
    )
    with ctx.store.writing() as tx:
        attached = batch.complete(tx)
        recreated_ids = _switch(tx, operation, steps)
        _leave(tx, operation, steps)
        tx.update_instance(row, request=request, tainted=False)
    pay_debts(ctx, operation.id)
    with ctx.store.writing() as tx:
        operation.finish(tx)
    return Change(
        instance.id,
        created=tuple(each for each in made if each.disk_id not in recreated_ids),
        recreated=tuple(
            dataclasses.replace(each, old=old[each.disk_id])
            for each in made
            if each.disk_id in recreated_ids
        ),
        kept=(*grown, *attached, *(_kept(ctx, *pair) for pair in steps.keep)),
        detached=tuple(_gone(ctx, *pair) for pair in steps.detach),
        deleted=tuple(
            DiskChange(disk.id, owner.name, old=old[disk.id])
            for owner, disk in steps.delete
        ),
    )


def _make(
    ctx: Context, batch: Batch, steps: _Steps, operation: Operation
) -> tuple[DiskChange, ...]:
    """All new objects. Where there is no room for a second one beside the present, and
    the operator wants it so, the present one is to be filled in place."""
    try:
        return batch.make()
    except exc.StorageFull as error:
        moved = steps.move_in_place(ctx, InPlace.WHEN_FULL)
        if not moved:
            raise
        LOG.warning("%s: the present disks are filled in place", error.message)
        for row in batch.forget({disk.id for _, disk, _, _ in moved}):
            drop_generation(ctx, row)
            with ctx.store.writing() as tx:
                if tx.generation(row.id) is not None:
                    tx.delete(row)
        with ctx.store.writing() as tx:
            for _, disk, _, _ in moved:
                held = tx.disk(disk.id)
                if held is not None:
                    settle_disk(tx, held)
        return batch.make()


def _fill_in_place(
    ctx: Context,
    operation: Operation,
    owner: OwnerRow,
    disk: DiskRow,
    recipe: Recipe,
    image: ImageInfo | None,
    auth: Any,
    progress: ProgressCallback | None,
) -> DiskChange:
    """Destroys before it makes, so the row says so before."""
    row = _object(ctx, disk)
    with ctx.store.writing() as tx:
        held = hold(tx, tx.disk(disk.id) or disk, DiskState.REPLACING, operation)
        held = tx.update_disk(held, reason=IN_PLACE)
    with ctx.fill(row, recipe, image, auth, progress) as fill:
        ctx.backend(row).reimage(ctx.generation(row), cast(FromImage, fill))
    with ctx.store.writing() as tx:
        tx.update_generation(row.id, image=recipe.image)
        settle_disk(
            tx,
            held,
            state=DiskState.READY,
            reason="",
            image=recipe.image,
            spec=model.to_json(recipe),
        )
    return DiskChange(disk.id, owner.name, disk.size, old=row.handle, new=row.handle)


def _switch(tx: Transaction, operation: Operation, steps: _Steps) -> set[str]:
    """New generations become current, the old ones debts: all disks at once."""
    recipes = {disk.id: recipe for _, disk, recipe, _ in steps.recreate}
    for disk in tx.disks_of(operation.id):
        if disk.state is not DiskState.REPLACING:
            continue
        for each in tx.generations(disk.id):
            if each.id == disk.generation_id:
                _owe(tx, each.id, operation)
            else:
                new = each
        settle_disk(
            tx,
            disk,
            state=DiskState.READY,
            reason="",
            generation_id=new.id,
            size=new.size,
            image=recipes[disk.id].image,
            spec=model.to_json(recipes[disk.id]),
        )
    return set(recipes) | {disk.id for _, disk, _, _ in steps.in_place}


def _owe(tx: Transaction, generation_id: str, operation: Operation) -> None:
    tx.update_generation(
        generation_id,
        state=GenerationState.DEBT,
        disk_id=None,
        operation_id=operation.id,
    )


def _leave(tx: Transaction, operation: Operation, steps: _Steps) -> None:
    for owner, disk in steps.delete:
        tx.delete(owner, disk)
        for each in tx.generations(disk.id):
            _owe(tx, each.id, operation)
    for owner, disk in steps.detach:
        detach(tx, owner, disk)


def detach(tx: Transaction, owner: OwnerRow, disk: DiskRow) -> None:
    """The instance leaves a disk that stays; without any owner it is ``kept``."""
    tx.delete(owner)
    fresh = tx.disk(disk.id)
    if fresh is None or tx.owners(disk.id) or fresh.state is DiskState.FAILED:
        return
    tx.update_disk(fresh, state=DiskState.KEPT)


def _grow(
    ctx: Context, operation: Operation, owner: OwnerRow, disk: DiskRow, recipe: Recipe
) -> DiskChange:
    """Grow in place; the size that the storage gives is committed at once."""
    row = _object(ctx, disk)
    with ctx.store.writing() as tx:
        held = hold(tx, disk, DiskState.RESIZING, operation)
    size = ctx.backend(row).resize(ctx.generation(row), recipe.size)
    with ctx.store.writing() as tx:
        tx.update_generation(row.id, size=size)
        settle_disk(tx, held, size=size, spec=model.to_json(recipe))
    return DiskChange(disk.id, owner.name, size, old=row.handle, new=row.handle)


def _object(ctx: Context, disk: DiskRow) -> GenerationRow:
    with ctx.store.reading() as rows:
        row = rows.generation(disk.generation_id or "")
    if row is None:
        raise exc.InternalError(f"disk {disk.id} has no generation")
    return row


def must_be_idle(
    ctx: Context, disk: DiskRow, owner: OwnerRow, *, patient: bool = False
) -> None:
    """:param patient: what looks like a user may be one that has died: wait for it.
    :raises Busy: a guest has it open. :raises HostConflict: another host has.
    :raises HostError, StorageUnavailable: its backend cannot be asked.
    """
    if disk.generation_id is None:
        return
    with ctx.store.reading() as rows:
        row = rows.generation(disk.generation_id)
        attached = rows.attachments(disk.generation_id)
        attachments = [
            each
            for each in attached
            if each.instance_id == owner.instance_id and each.host_id != ctx.host.id
        ]
        names = [rows.host_name(each.host_id) for each in attachments]
    if attachments:
        raise exc.HostConflict(
            f"disk {owner.name!r} of instance {owner.instance_id} is connected to "
            f"host {', '.join(names)}: let that host disconnect it first",
            disk=disk.id,
            host=attachments[0].host_id,
        )
    if row is None:
        return
    # While this host is connected, a user is a guest that runs rather than a dead one.
    patient = patient and not attached
    deadline = time.monotonic() + (ctx.backend(row).lingering if patient else 0)
    pause = 0.1
    # Asked for a shareable one as well: the storage must answer before all else.
    while used_by := _users(ctx, row):
        if disk.shareable:
            return
        if time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 2.0)
            continue
        raise exc.Busy(
            f"disk {owner.name!r} of instance {owner.instance_id} is in use by "
            f"{', '.join(used_by)}: stop the guest first",
            disk=disk.id,
            used_by=list(used_by),
        )


def _users(ctx: Context, row: GenerationRow) -> Sequence[str]:
    try:
        found = ctx.backend(row).stat(ctx.generation(row))
    except exc.IntegrityError as error:
        # A damaged disk can be left, replaced or deleted.
        return cast(Sequence[str], error.values.get("used_by", ()))
    return found.used_by if found is not None else ()


def release(ctx: Context, disk: DiskRow, owner: OwnerRow) -> None:
    """Disconnect this host from a disk that the instance leaves."""
    if disk.generation_id is None:
        return
    with ctx.store.reading() as rows:
        attachments = [
            each
            for each in rows.attachments(disk.generation_id)
            if each.instance_id == owner.instance_id
        ]
    for each in attachments:
        ctx.disconnect(each)


def _handle(ctx: Context, disk: DiskRow) -> Handle | None:
    with ctx.store.reading() as rows:
        row = rows.generation(disk.generation_id or "")
    return row.handle if row else None


def _kept(ctx: Context, owner: OwnerRow, disk: DiskRow) -> DiskChange:
    handle = _handle(ctx, disk)
    return DiskChange(disk.id, owner.name, disk.size, old=handle, new=handle)


def _gone(ctx: Context, owner: OwnerRow, disk: DiskRow) -> DiskChange:
    return DiskChange(disk.id, owner.name, disk.size, old=_handle(ctx, disk))
