# SPDX-License-Identifier: Apache-2.0
"""create: an instance's disks, all of them or none."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import exc as sa_exc

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.actions.context import (
    Context,
    commit_creation,
    free,
    settle_disk,
)
from imagebackend.actions.places import place
from imagebackend.actions.settle import begin
from imagebackend.model import (
    Change,
    Creation,
    DiskChange,
    DiskSpec,
    DiskState,
    GenerationState,
    ImageInfo,
    Instance,
    Placement,
    Plan,
    PlannedDisk,
    ProgressCallback,
)
from imagebackend.selection import Recipe, Wanted, next_device
from imagebackend.store.operations import Operation
from imagebackend.store.rows import (
    DiskRow,
    GenerationRow,
    InstanceRow,
    OwnerRow,
    Reader,
    Transaction,
)


def plan(
    ctx: Context, instance: Instance, disks: Sequence[DiskSpec], auth: Any = None
) -> Plan:
    """What ``create`` would do; no effect."""
    selection = ctx.selection(auth, effects=False)
    planned: list[PlannedDisk] = []
    attached: list[str] = []
    devices: list[str] = []
    for wanted in selection.wanted(instance, disks):
        device = next_device(wanted.bus, devices)
        devices.append(device)
        recipe = wanted.recipe
        if recipe is None:
            disk_id = str(wanted.disk_id)
            with ctx.store.reading() as rows:
                if rows.instance(instance.id) is None:
                    may_attach(rows, disk_id, instance)
            attached.append(disk_id)
            continue
        placement = place(ctx, selection, recipe, instance, wanted.image)
        planned.append(
            PlannedDisk(
                name=wanted.name,
                role=recipe.role,
                lifecycle=recipe.lifecycle,
                size=placement.size,
                placement=placement,
                bus=wanted.bus,
                device=device,
                image=recipe.image,
                shareable=recipe.shareable,
                cdrom=recipe.cdrom,
                why=wanted.why,
            )
        )
    with ctx.store.reading() as rows:
        known = rows.instance(instance.id)
    if known is not None and known.request != request_text(instance, disks):
        raise _asked_differently(instance)
    return Plan(instance.id, tuple(planned), tuple(attached))


def create(
    ctx: Context,
    instance: Instance,
    disks: Sequence[DiskSpec],
    *,
    auth: Any = None,
    progress: ProgressCallback | None = None,
) -> Change:
    """See :meth:`imagebackend.manager.DiskManager.create`."""
    wanted = ctx.selection(auth).wanted(instance, disks)
    request = request_text(instance, disks)
    same = _already(ctx, instance, request)
    if same is not None:
        return same
    with begin(ctx, "create", instance.id) as operation:
        same = _already(ctx, instance, request, operation.id)
        if same is not None:
            with ctx.store.writing() as tx:
                operation.finish(tx)
            return same
        _refuse_leftovers(ctx, instance.id)
        batch = Batch(ctx, operation, instance, auth, progress)
        placements = batch.place(wanted)
        with ctx.store.writing() as tx:
            tx.insert(
                InstanceRow(instance.id, instance.project_id, ctx.host.id, request)
            )
            batch.announce(tx, wanted, placements, [])
        created = batch.make()
        with ctx.store.writing() as tx:
            attached = batch.complete(tx)
            operation.finish(tx)
    return Change(instance.id, created=created, kept=attached)


def _refuse_leftovers(ctx: Context, instance_id: str) -> None:
    """:raises Conflict: disks of a destroyed instance of that id could not go."""
    with ctx.store.reading() as rows:
        owned = rows.owned(instance_id)
    if owned:
        names = ", ".join(owner.name for owner, _ in owned)
        raise exc.Conflict(
            f"instance {instance_id} was destroyed, but its disks {names} could not be "
            f"deleted: destroy it again first",
            instance=instance_id,
        )


def request_text(instance: Instance, disks: Sequence[DiskSpec]) -> str:
    """What was asked for, comparable as text."""
    return model.dumps({"instance": instance, "disks": list(disks)})


def _already(
    ctx: Context, instance: Instance, request: str, mine: str = ""
) -> Change | None:
    """The disks that a former, equal request made.

    :param mine: the operation that asks.
    """
    with ctx.store.reading() as rows:
        row = rows.instance(instance.id)
        if row is None:
            return None
        running = rows.operation(instance.id)
        owned = rows.owned(instance.id)
        handles = {
            disk.id: current.handle
            for _, disk in owned
            if disk.generation_id
            and (current := rows.generation(disk.generation_id)) is not None
        }
    if running is not None and running.id != mine and running.verb == "create":
        return None  # begin() tells whether its owner lives
    if row.request != request:
        raise _asked_differently(instance)
    for _, disk in owned:
        free(disk, "create")
    return Change(
        instance.id,
        kept=tuple(
            DiskChange(
                disk.id,
                owner.name,
                disk.size,
                old=handles.get(disk.id),
                new=handles.get(disk.id),
            )
            for owner, disk in owned
        ),
    )


def _asked_differently(instance: Instance) -> exc.Conflict:
    return exc.Conflict(
        f"instance {instance.id} exists already and was asked for differently: use "
        f"update, rebuild or resize to change it",
        instance=instance.id,
    )


def may_attach(rows: Reader, disk_id: str, instance: Instance) -> DiskRow:
    """An existing disk that the instance may have too.

    :raises DiskNotFound, DiskInUse, Busy, Conflict:
    """
    disk = rows.disk(disk_id)
    if disk is None or disk.project_id != instance.project_id:
        raise exc.DiskNotFound(
            f"disk {disk_id} is not one of project {instance.project_id!r}: "
            f"`imagebackend disk list` has what there is",
            disk=disk_id,
        )
    free(disk, "attach")
    owners = [owner.instance_id for owner in rows.owners(disk_id)]
    if owners and not disk.shareable:
        raise exc.DiskInUse(
            f"disk {disk_id} belongs to instance {', '.join(owners)}, and was not "
            f"declared shareable",
            disk=disk_id,
            owners=owners,
        )
    return disk


class Batch:
    """Disks that are made together within one operation."""

    def __init__(
        self,
        ctx: Context,
        operation: Operation,
        instance: Instance,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._ctx = ctx
        self._operation = operation
        self._instance = instance
        self._auth = auth
        self._progress = progress
        self._new: list[tuple[str, Recipe, ImageInfo | None, GenerationRow]] = []
        self._made: dict[str, Creation] = {}
        self._attach: list[OwnerRow] = []

    def place(self, wanted: Sequence[Wanted]) -> list[Placement | None]:
        """A placement for each disk that is to be made; asks storages, so it is done
        before a transaction begins."""
        selection = self._ctx.selection(self._auth)
        return [
            None
            if each.recipe is None
            else place(self._ctx, selection, each.recipe, self._instance, each.image)
            for each in wanted
        ]

    def announce(
        self,
        tx: Transaction,
        wanted: Sequence[Wanted],
        placements: Sequence[Placement | None],
        present: Sequence[tuple[OwnerRow, DiskRow]],
    ) -> None:
        """Rows that precede the objects, in the caller's transaction.

        :param present: disks that the instance has and keeps.
        """
        ctx, operation = self._ctx, self._operation
        devices = [owner.device for owner, _ in present]
        position = max([owner.position for owner, _ in present], default=-1)
        for each, placement in zip(wanted, placements, strict=True):
            position += 1
            device = next_device(each.bus, devices)
            devices.append(device)
            if each.recipe is None or placement is None:
                owner = OwnerRow(
                    str(each.disk_id),
                    self._instance.id,
                    each.name,
                    each.bus,
                    device,
                    position,
                )
                self._claim(tx, owner)
                continue
            disk = self._disk_row(each.name, each.recipe, placement)
            row = ctx.new_generation(
                disk.id,
                each.name,
                self._instance.id,
                self._instance.project_id,
                each.recipe,
                placement,
                operation.id,
                each.image,
            )
            tx.insert(
                disk,
                OwnerRow(
                    disk.id, self._instance.id, each.name, each.bus, device, position
                ),
                row,
            )
            self._new.append((each.name, each.recipe, each.image, row))

    def replace(
        self,
        tx: Transaction,
        owner: OwnerRow,
        disk: DiskRow,
        recipe: Recipe,
        image: ImageInfo | None,
        placement: Placement,
    ) -> GenerationRow:
        """A new generation's row for an existing disk."""
        row = self._ctx.new_generation(
            disk.id,
            owner.name,
            self._instance.id,
            disk.project_id,
            recipe,
            placement,
            self._operation.id,
            image,
        )
        tx.insert(row)
        self._new.append((owner.name, recipe, image, row))
        return row

    def make(self) -> tuple[DiskChange, ...]:
        """Make all objects that were announced."""
        changes = []
        for name, recipe, image, row in self._new:
            made = self._made.get(row.id) or self._ctx.make(
                row, recipe, image, self._auth, self._progress
            )
            self._made[row.id] = made
            changes.append(
                DiskChange(
                    str(row.disk_id), name, made.size, new=made.handle, path=made.path
                )
            )
        return tuple(changes)

    def forget(self, disks: Collection[str]) -> list[GenerationRow]:
        """Leave these disks out after all; their rows, for the caller to drop."""
        left = [row for _, _, _, row in self._new if row.disk_id in disks]
        self._new = [each for each in self._new if each[3] not in left]
        return left

    def complete(self, tx: Transaction) -> tuple[DiskChange, ...]:
        """What was made becomes current, and new disks ready; existing disks, which
        were attached, are returned."""
        current = {"state": GenerationState.CURRENT, "operation_id": None}
        made = {}
        for _, _, _, row in self._new:
            commit_creation(tx, row, self._made[row.id], **current)
            made[row.disk_id] = (row.id, self._made[row.id].size)
        for disk in tx.disks_of(self._operation.id):
            if disk.state is not DiskState.CREATING:
                continue
            generation_id, size = made[disk.id]
            settle_disk(
                tx,
                disk,
                state=DiskState.READY,
                generation_id=generation_id,
                size=size,
            )
        attached = []
        for owner in self._attach:
            existing = may_attach(tx, owner.disk_id, self._instance)
            with _taken(owner):
                tx.insert(owner)
            tx.update_disk(existing, state=DiskState.READY)
            attached.append(DiskChange(existing.id, owner.name, existing.size))
        return tuple(attached)

    def _disk_row(self, name: str, recipe: Recipe, placement: Placement) -> DiskRow:
        return DiskRow(
            id=str(uuid.uuid4()),
            name=name,
            project_id=self._instance.project_id,
            host_id=self._ctx.host.id,
            role=recipe.role,
            lifecycle=recipe.lifecycle,
            state=DiskState.CREATING,
            operation_id=self._operation.id,
            shareable=recipe.shareable,
            cdrom=recipe.cdrom,
            size=placement.size,
            image=recipe.image,
            spec=model.to_json(recipe),
        )

    def _claim(self, tx: Transaction, owner: OwnerRow) -> None:
        may_attach(tx, owner.disk_id, self._instance)
        self._attach.append(owner)


@contextlib.contextmanager
def _taken(owner: OwnerRow) -> Iterator[None]:
    try:
        yield
    except sa_exc.IntegrityError as error:
        raise exc.Conflict(
            f"instance {owner.instance_id} has disk {owner.disk_id} already, or "
            f"another one named {owner.name!r}",
            disk=owner.disk_id,
        ) from error
