# SPDX-License-Identifier: Apache-2.0
"""list, capacity, audit, recover, export_rows: nothing here makes a disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.actions import places
from imagebackend.actions.context import Context, instance_of
from imagebackend.actions.replace import known_instance
from imagebackend.actions.settle import begin, purge, settle
from imagebackend.backends.base import Backend
from imagebackend.model import (
    JSON,
    Disk,
    DiskState,
    Finding,
    Found,
    GenerationState,
    Handle,
    Instance,
    Inventory,
    Marker,
    Severity,
)
from imagebackend.store.rows import (
    DiskRow,
    GenerationRow,
    HostRow,
    OperationRow,
    OwnerRow,
)

LOG = log.getLogger(__name__)


def list_disks(ctx: Context, instance_id: str | None) -> Iterator[Disk]:
    """See :meth:`imagebackend.manager.DiskManager.list`."""
    if instance_id is not None:
        with ctx.store.reading() as rows:
            found = [
                ctx.disk(rows, disk, owner) for owner, disk in rows.owned(instance_id)
            ]
        yield from found
        return
    for page in ctx.store.disk_pages():
        with ctx.store.reading() as rows:
            disks = []
            for row in page:
                owners: list[OwnerRow | None] = [*rows.owners(row.id)] or [None]
                disks += [ctx.disk(rows, row, owner) for owner in owners]
        yield from disks


def one_disk(ctx: Context, disk_id: str) -> Disk:
    """See :meth:`imagebackend.manager.DiskManager.disk`."""
    with ctx.store.reading() as rows:
        row = rows.disk(disk_id)
        if row is None:
            raise exc.DiskNotFound(f"disk {disk_id} is not recorded", disk=disk_id)
        owners = rows.owners(disk_id)
        return ctx.disk(rows, row, owners[0] if owners else None)


def recorded_instance(ctx: Context, instance_id: str) -> Instance:
    """See :meth:`imagebackend.manager.DiskManager.instance`."""
    with ctx.store.reading() as rows:
        return instance_of(known_instance(rows, instance_id).request)


def capacity(ctx: Context) -> Sequence[Inventory]:
    """See :meth:`imagebackend.manager.DiskManager.capacity`."""
    found: list[Inventory] = []
    for name in ctx.backends.names:
        try:
            found += ctx.backends.get(name).capacity()
        except exc.ImageBackendError as error:
            # One storage that is down must not hide the room in the others.
            LOG.warning("no capacity of backend %s: %s", name, error)
    used = ctx.cache.usage()
    found.append(
        Inventory(
            backend="image cache",
            provider=f"cache:{ctx.cache.path}",
            total=0,
            free=0,
            used_by_us=used,
            what="images",
        )
    )
    return found


def audit(ctx: Context) -> Iterator[Finding]:
    """See :meth:`imagebackend.manager.DiskManager.audit`."""
    damage = ctx.store.database.damage()
    if damage:
        yield Finding(
            Severity.ERROR, "store", damage, "restore the store from a backup"
        )
    with ctx.store.reading() as rows:
        operations = rows.operations()
    for operation in operations:
        yield from _audit_operation(ctx, operation)
    for _, finding in places.lost(ctx):
        yield finding
    yield from places.forgotten(ctx, ctx.backends)
    storages: set[str] = set()
    for name in ctx.backends.names:
        yield from _audit_storage(ctx, name, storages)
    for page in ctx.store.disk_pages():
        for disk in page:
            if disk.host_id == ctx.host.id:
                yield from _audit_disk(ctx, disk)
    for generations in ctx.store.generation_pages():
        for row in generations:
            if row.host_id == ctx.host.id:
                yield from _audit_generation(ctx, row)
    yield from _audit_cache(ctx)


def recover(ctx: Context, *, dry_run: bool) -> Iterator[Finding]:
    """See :meth:`imagebackend.manager.DiskManager.recover`."""
    with ctx.store.reading() as rows:
        operations = rows.operations()
        debts = rows.debts(ctx.host.id)
    live = set()
    for operation in operations:
        alive = ctx.operations.alive(operation)
        if alive is not False:
            live.add(operation.id)
            if alive is None:
                yield _of_other_host(ctx, operation)
        elif dry_run:
            yield _would_settle(ctx, operation)
        else:
            yield from _recover_one(ctx, operation)
    for debt in debts:
        if dry_run and debt.operation_id not in live:
            yield Finding(
                Severity.WARNING,
                f"object {debt.id} of {debt.backend}",
                debt.reason or "is still to be purged",
                action="would be purged",
            )
    yield from _recover_twins(ctx, dry_run=dry_run)
    if dry_run:
        return
    yield from purge(ctx, [debt for debt in debts if debt.operation_id not in live])
    for name in ctx.operations.sweep():
        yield Finding(Severity.OK, f"lock {name}", "had no owner: removed")
    for name in ctx.cache.sweep():
        yield Finding(Severity.OK, f"image fetch {name}", "had no owner: removed")


def recover_at_start(ctx: Context) -> None:
    """Settle what died on this host, before its first verb; log what is left."""
    me = HostRow(ctx.host.id, ctx.host.hostname)
    with ctx.store.reading() as rows:
        operations = rows.operations(me.id)
        known = rows.host(me.id)
    if known != me:
        with ctx.store.writing() as tx:
            tx.delete(me)
            tx.insert(me)
    for operation in operations:
        if ctx.operations.alive(operation) is False:
            for finding in _recover_one(ctx, operation):
                LOG.info("%s: %s", finding.subject, finding.what)


def export_rows(ctx: Context, instance_id: str) -> JSON:
    """See :meth:`imagebackend.manager.DiskManager.export_rows`."""
    with ctx.store.reading() as rows:
        instance = known_instance(rows, instance_id)
        owned = rows.owned(instance_id)
        generations = [row for _, disk in owned for row in rows.generations(disk.id)]
        return {
            "deployment_id": rows.meta("deployment_id"),
            "instance": _plain(instance),
            "owners": [_plain(owner) for owner, _ in owned],
            "disks": [_plain(disk) for _, disk in owned],
            "generations": [_plain(row) for row in generations],
            "attachments": [
                _plain(each) for row in generations for each in rows.attachments(row.id)
            ],
        }


def _plain(row: object) -> JSON:
    plain: JSON = model.to_json(row)
    return plain


# --- audit ------------------------------------------------------------------


def _died(operation: OperationRow) -> str:
    return (
        f"{operation.verb} of {operation.target} (process {operation.pid}) died "
        f"half way"
    )


def _would_settle(ctx: Context, operation: OperationRow) -> Finding:
    with ctx.store.reading() as rows:
        objects = rows.generations_of(operation.id)
        for disk in rows.disks_of(operation.id):
            objects += rows.generations(disk.id)
    what, action = _died(operation), "would be settled"
    try:
        places.must_answer(ctx, objects)
    except (exc.HostError, exc.StorageUnavailable) as error:
        what += f"; it cannot be settled now: {error.message}"
        action = "would be left as it is"
    except exc.ImageBackendError:
        pass  # of one object, which settling tells
    return Finding(Severity.WARNING, f"operation {operation.id}", what, action=action)


def _of_other_host(ctx: Context, operation: OperationRow) -> Finding:
    seconds = int(time.time() - operation.started_at)
    with ctx.store.reading() as rows:
        host = rows.host_name(operation.host_id)
    return Finding(
        Severity.WARNING,
        f"operation {operation.id}",
        f"{operation.verb} of {operation.target} runs on host {host} "
        f"since {seconds} s: only that host can tell whether it lives",
        action="left as it is",
    )


def _audit_operation(ctx: Context, operation: OperationRow) -> Iterator[Finding]:
    alive = ctx.operations.alive(operation)
    if alive is False:
        yield Finding(
            Severity.ERROR,
            f"operation {operation.id}",
            _died(operation),
            "run `imagebackend recover --apply`",
        )
    elif alive is None:
        yield _of_other_host(ctx, operation)


def _audit_storage(ctx: Context, name: str, storages: set[str]) -> Iterator[Finding]:
    """From the storage to the rows: objects of ours that no row knows.

    :param storages: that were looked at already, under another backend's name.
    """
    try:
        backend = ctx.backends.get(name)
        providers = {inventory.provider for inventory in backend.capacity()}
        if providers and providers <= storages:
            return
        storages |= providers
        for found in backend.scan():
            if found.marker is None:
                yield Finding(
                    Severity.OK, f"{name}: {found.name}", "is not ours: left alone"
                )
            elif found.marker.deployment_id != ctx.deployment_id:
                yield Finding(
                    Severity.OK,
                    f"{name}: {found.name}",
                    f"belongs to deployment {found.marker.deployment_id}: left alone",
                )
            else:
                yield from _audit_found(ctx, backend, found, found.marker)
    except exc.ImageBackendError as error:
        yield Finding(
            Severity.ERROR, f"backend {name}", error.message, "its state is unknown"
        )


def _audit_found(
    ctx: Context, backend: Backend, found: Found, marker: Marker
) -> Iterator[Finding]:
    # Rows come before objects: asked after the object was seen, no row means that
    # there never was one.
    with ctx.store.reading() as rows:
        row = rows.generation(marker.generation_id)
    if row is None:
        yield Finding(
            Severity.ERROR,
            f"{backend.name}: {found.name}",
            "carries our marker, but no row knows it",
            "was the store restored from an older backup? remove the object by hand "
            "once you are sure that nobody needs it",
        )
    elif backend.TWINS and _is_twin(found, row):
        yield Finding(
            Severity.ERROR,
            f"{backend.name}: {found.name}",
            f"carries the marker of generation {row.id}, which is another object",
            "run `imagebackend recover --apply`; what it leaves is somebody else's "
            "doing",
        )
    elif backend.TWINS and row.host_id == ctx.host.id:
        _, loose = _parts(ctx, found, row)
        if loose:
            yield Finding(
                Severity.ERROR,
                f"{backend.name}: {found.name}",
                f"has what is in no row: {', '.join(map(_words, loose))}",
                "run `imagebackend recover --apply`",
            )


def _words(part: Handle) -> str:
    return " ".join(f"{key} {value}" for key, value in part.items())


def _parts(
    ctx: Context, found: Found, row: GenerationRow
) -> tuple[list[Handle], list[Handle]]:
    """Handles of an object's connections and snapshots: those that are recorded, and
    parts of it that are not."""
    if not found.parts:
        return [], []
    with ctx.store.reading() as rows:
        disk = rows.disk(row.disk_id) if row.disk_id else None
        attachments, snapshots = rows.attachments(row.id), rows.snapshots(row.id)
    recorded = [each.handle for each in attachments]
    recorded += [each.handle for each in snapshots]
    holders = [row, disk, *attachments, *snapshots]
    if any(each.operation_id for each in holders if each is not None):
        # What it makes, it may not have recorded yet.
        return recorded, []
    return recorded, [
        part
        for part in found.parts
        if not any(part.items() <= handle.items() for handle in recorded)
    ]


def _is_twin(found: Found, row: GenerationRow) -> bool:
    """While an operation is at it, its object may change."""
    return row.operation_id is None and any(
        key in row.handle and row.handle[key] != value
        for key, value in found.handle.items()
    )


def _recover_twins(ctx: Context, *, dry_run: bool) -> Iterator[Finding]:
    for name in ctx.backends.names:
        try:
            if ctx.backends.driver(name).TWINS:
                yield from _drop_twins(ctx, name, dry_run=dry_run)
        except exc.ImageBackendError as error:
            yield Finding(
                Severity.WARNING,
                f"backend {name}",
                f"what is in no row could not be looked for: {error.message}",
                action="left as it is",
            )


def _drop_twins(ctx: Context, name: str, *, dry_run: bool) -> Iterator[Finding]:
    """Objects beside the recorded ones, which a lost answer left."""
    backend = ctx.backends.get(name)
    for found in list(backend.scan()):
        if found.marker is None or found.marker.deployment_id != ctx.deployment_id:
            continue
        with ctx.store.reading() as rows:
            row = rows.generation(found.marker.generation_id)
        if row is None or row.host_id != ctx.host.id:
            continue
        if not _is_twin(found, row) and not _parts(ctx, found, row)[1]:
            continue
        subject = f"{name}: {found.name}"
        if dry_run:
            yield Finding(
                Severity.WARNING,
                subject,
                f"is beside what is recorded of generation {row.id}, or has more",
                action="would be removed",
            )
            continue
        try:
            with begin(ctx, "recover", row.instance_id or row.id) as operation:
                # Nothing is made there now; what was seen may be recorded by now.
                recorded, _ = _parts(ctx, found, row)
                count = backend.drop_twins(ctx.generation(row), recorded)
                with ctx.store.writing() as tx:
                    operation.finish(tx)
        except exc.Busy as error:
            yield Finding(
                Severity.WARNING, subject, error.message, action="left as it is"
            )
            continue
        if count:
            what = f"{count} beside what is recorded of generation {row.id}: removed"
            yield Finding(Severity.OK, subject, what)


def _audit_disk(ctx: Context, disk: DiskRow) -> Iterator[Finding]:
    subject = f"disk {disk.id} ({disk.name})"
    if disk.state is DiskState.FAILED:
        yield Finding(
            Severity.ERROR,
            subject,
            f"failed: {disk.reason}",
            "save what its object still has, then destroy the instance, or delete "
            "the disk if none has it",
        )
    if disk.operation_id is not None or disk.state is DiskState.FAILED:
        return
    with ctx.store.reading() as rows:
        row = rows.generation(disk.generation_id or "")
        owners = rows.owners(disk.id)
    if not owners and disk.state is not DiskState.KEPT:
        yield Finding(Severity.ERROR, subject, "has no owner, but is not kept")
    if row is None:
        yield Finding(Severity.ERROR, subject, "has no object", "report a bug")
        return
    yield from _audit_object(ctx, subject, disk, row)


def _audit_object(
    ctx: Context, subject: str, disk: DiskRow, row: GenerationRow
) -> Iterator[Finding]:
    try:
        found = ctx.backend(row).stat(ctx.generation(row))
    except (exc.IntegrityError, exc.ObjectExists) as error:
        yield Finding(
            Severity.ERROR,
            subject,
            error.message,
            "restore it, or destroy or rebuild the instance",
        )
        return
    except exc.ImageBackendError as error:
        yield Finding(Severity.WARNING, subject, error.message, "its state is unknown")
        return
    if found is None:
        yield Finding(
            Severity.ERROR,
            subject,
            f"its object is not in backend {row.backend!r} any more",
            "restore it, or destroy the instance",
        )
    elif found.size != disk.size:
        advice = "restore it: what was behind its end is lost"
        if found.size > disk.size:
            advice = "somebody else resized it: resize the instance to that size"
        yield Finding(
            Severity.ERROR,
            subject,
            f"has {found.size} bytes in backend {row.backend!r}, recorded are "
            f"{disk.size}",
            advice,
        )


def _audit_generation(ctx: Context, row: GenerationRow) -> Iterator[Finding]:
    if row.state is GenerationState.DEBT:
        yield Finding(
            Severity.WARNING,
            f"object {row.id} of {row.backend}",
            row.reason or "is still to be purged",
            "run `imagebackend recover --apply`",
        )
    if row.entry and row.operation_id is None and row.state is not GenerationState.DEBT:
        try:
            ctx.cache.must_have(row.entry)
        except exc.IntegrityError as error:
            yield Finding(
                Severity.ERROR,
                f"object {row.id} of {row.backend}",
                f"needs image cache entry {row.entry}, but {error.message}",
                "restore the entry: the disk cannot be read without it",
            )


def _audit_cache(ctx: Context) -> Iterator[Finding]:
    for entry in ctx.cache.entries(verify=True):
        if entry.broken:
            advice = "`imagebackend cache prune` removes it: no disk is based on it"
            if ctx.cache.needed(entry.entry):
                advice = "put its file back, from a backup: disks are based on it"
            yield Finding(
                Severity.ERROR, f"image cache: {entry.entry}", entry.broken, advice
            )


# --- recovery ---------------------------------------------------------------


def _recover_one(ctx: Context, row: OperationRow) -> Iterator[Finding]:
    operation = ctx.operations.take_over(row)
    if operation is None:
        return
    try:
        found = settle(ctx, operation)
        with ctx.store.reading() as rows:
            left = rows.operation(row.target)
        settled = left is None or left.id != row.id
        yield Finding(
            Severity.WARNING,
            f"operation {row.id}",
            _died(row),
            action="settled" if settled else "not settled yet",
        )
        yield from found
    finally:
        operation.close()
