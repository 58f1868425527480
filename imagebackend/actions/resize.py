# SPDX-License-Identifier: Apache-2.0
"""resize: an instance's disks grow to what its new flavor says."""

from __future__ import annotations

import dataclasses
from typing import Any

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.actions.context import (
    Context,
    free,
    hold,
    instance_of,
    recipe_of,
    settle_disk,
    specs_of,
)
from imagebackend.actions.create import request_text
from imagebackend.actions.places import must_be_whole
from imagebackend.actions.replace import known_instance, must_be_idle
from imagebackend.actions.settle import begin
from imagebackend.libvirt.guest import GuestDisks
from imagebackend.model import (
    Change,
    DiskChange,
    DiskState,
    Instance,
    Progress,
    ProgressCallback,
    Role,
    Way,
)
from imagebackend.selection import Recipe, Wanted
from imagebackend.store.rows import DiskRow, GenerationRow, InstanceRow, OwnerRow


@dataclasses.dataclass(frozen=True)
class _Growth:
    owner: OwnerRow
    disk: DiskRow
    row: GenerationRow
    recipe: Recipe


def resize(
    ctx: Context,
    instance: Instance,
    guest: GuestDisks | None = None,
    *,
    auth: Any = None,
    progress: ProgressCallback | None = None,
) -> Change:
    """See :meth:`imagebackend.manager.DiskManager.resize`."""
    with begin(ctx, "resize", instance.id) as operation:
        with ctx.store.reading() as rows:
            before = known_instance(rows, instance.id)
            owned = rows.owned(instance.id)
        recorded = instance_of(before.request)
        instance = dataclasses.replace(recorded, flavor=instance.flavor)
        for _, disk in owned:
            free(disk, "resize")
        growths, same = _plan(ctx, before, instance, owned, auth)
        for growth in growths:
            _check(ctx, growth, guest)
        changed = []
        for number, growth in enumerate(growths):
            if progress is not None:
                progress(Progress("grow", number, len(growths)))
            with ctx.store.writing() as tx:
                held = hold(tx, growth.disk, DiskState.RESIZING, operation)
            size = _grow(ctx, growth, guest)
            with ctx.store.writing() as tx:
                tx.update_generation(growth.row.id, size=size)
                settle_disk(tx, held, size=size, spec=model.to_json(growth.recipe))
            changed.append(
                DiskChange(
                    growth.disk.id,
                    growth.owner.name,
                    size,
                    old=growth.row.handle,
                    new=growth.row.handle,
                )
            )
        disks = specs_of(before.request)
        with ctx.store.writing() as tx:
            tx.update_instance(before, request=request_text(instance, disks))
            operation.finish(tx)
    return Change(
        instance.id,
        kept=(
            *changed,
            *(DiskChange(disk.id, owner.name, disk.size) for owner, disk in same),
        ),
    )


def _plan(
    ctx: Context,
    before: InstanceRow,
    instance: Instance,
    owned: list[tuple[OwnerRow, DiskRow]],
    auth: Any,
) -> tuple[list[_Growth], list[tuple[OwnerRow, DiskRow]]]:
    """What grows. Everything is refused here, before anything is touched."""
    specs = specs_of(before.request)
    selection = ctx.selection(auth)
    wanted = {
        each.name: each for each in selection.resized(instance, specs, _sizes(owned))
    }
    growths, same = [], []
    for owner, disk in owned:
        each = wanted.get(owner.name)
        if each is None:
            if disk.role in (Role.EPHEMERAL, Role.SWAP) and not disk.shareable:
                raise exc.SizeRefused(
                    f"instance {instance.id}: flavor "
                    f"{instance.flavor and instance.flavor.name!r} has no room for "
                    f"disk {owner.name!r}; a resize never removes or shrinks a disk",
                    disk=disk.id,
                )
            same.append((owner, disk))
            continue
        recipe = _grown_recipe(owner, disk, each)
        if recipe is None:
            same.append((owner, disk))
            continue
        with ctx.store.reading() as rows:
            row = rows.generation(disk.generation_id or "")
        if row is None:
            raise exc.InternalError(f"disk {disk.id} has no object")
        growths.append(_Growth(owner, disk, row, recipe))
    missing = set(wanted) - {owner.name for owner, _ in owned}
    if missing:
        raise exc.Conflict(
            f"instance {instance.id}: the new flavor has disks that it has not: "
            f"{', '.join(sorted(missing))}; use update to add them",
            missing=sorted(missing),
        )
    return growths, same


def _sizes(owned: list[tuple[OwnerRow, DiskRow]]) -> dict[str, int]:
    return {owner.name: disk.size for owner, disk in owned}


def _grown_recipe(owner: OwnerRow, disk: DiskRow, each: Wanted) -> Recipe | None:
    """The recipe at its new size; None if the disk stays as it is."""
    if each.recipe is None:
        return None
    present = recipe_of(disk)
    moved = [
        f"{key} {getattr(each.recipe, key)!r}"
        for key in ("backend", "pool", "volume_type")
        if each.why != "host" and getattr(each.recipe, key) != getattr(present, key)
    ]
    if moved:
        raise exc.NotSupported(
            f"disk {owner.name!r} would have to move to {', '.join(moved)}: a resize "
            f"grows a disk where it is",
            disk=disk.id,
        )
    if each.recipe.size < present.size:
        raise exc.SizeRefused(
            f"disk {owner.name!r} has {present.size} bytes and would shrink to "
            f"{each.recipe.size}: disks only grow",
            disk=disk.id,
            size=each.recipe.size,
        )
    if each.recipe.size == present.size:
        return None
    return dataclasses.replace(present, size=each.recipe.size)


def _check(ctx: Context, growth: _Growth, guest: GuestDisks | None) -> None:
    if guest is None:
        must_be_idle(ctx, growth.disk, growth.owner)
    must_be_whole(ctx, [growth.row])
    if guest is None:
        return
    capabilities = ctx.backend(growth.row).capabilities(ctx.generation(growth.row))
    if capabilities.live_resize is Way.NONE:
        raise exc.NotSupported(
            f"disk {growth.owner.name!r} cannot grow while its guest runs: backend "
            f"{growth.row.backend!r} does not allow it; stop the guest first",
            disk=growth.disk.id,
        )


def _grow(ctx: Context, growth: _Growth, guest: GuestDisks | None) -> int:
    backend = ctx.backend(growth.row)
    generation = ctx.generation(growth.row)
    size = growth.recipe.size
    if guest is None:
        return backend.resize(generation, size)
    way = backend.capabilities(generation).live_resize
    seen = size
    if way is Way.STORAGE:
        size = backend.resize(generation, size)
        seen = backend.guest_size(generation, size)
    # The hypervisor grows the disk itself, or is told that the storage has.
    guest.block_resize(growth.disk.id, seen)
    found = backend.stat(generation)
    if found is None or found.size < size:
        raise exc.StorageError(
            f"disk {growth.owner.name!r} was to grow to {size} bytes, but has "
            f"{found.size if found else 0}",
            disk=growth.disk.id,
        )
    return found.size
