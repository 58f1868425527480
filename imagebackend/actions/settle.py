# SPDX-License-Identifier: Apache-2.0
"""Bring what an operation left half done back to a settled state.

Undo and recovery are the same code: an action that fails calls it for itself, and
recovery calls it for the operations of dead owners. It trusts the rows alone, and
may itself be killed at any point and run again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence

from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.actions.context import IN_PLACE, Context, settle_disk
from imagebackend.libvirt import guest
from imagebackend.model import (
    DiskState,
    Finding,
    GenerationState,
    Severity,
    UploadTarget,
)
from imagebackend.store.operations import Operation
from imagebackend.store.rows import DiskRow, GenerationRow, Transaction

LOG = log.getLogger(__name__)


@contextlib.contextmanager
def begin(ctx: Context, verb: str, target: str, **detail: str) -> Iterator[Operation]:
    """Hold ``target`` for the block; when the block fails, everything is settled.

    :raises Busy: a live operation holds it.
    """

    def undo(held: Operation) -> None:
        for finding in settle(ctx, held):
            LOG.log(
                logging.INFO if finding.severity is Severity.OK else logging.ERROR,
                "%s %s: %s: %s",
                verb,
                target,
                finding.subject,
                finding.what,
            )

    with ctx.operations.begin(verb, target, undo, **detail) as operation:
        yield operation


def settle(ctx: Context, operation: Operation) -> list[Finding]:
    """Settle every row that the operation holds, then end it.

    What a storage or host that is out of order does not let be settled stays with the
    operation, which is dead from now on: recovery, or the next verb on the same
    target, tries again. What no time will heal leaves the disk ``failed``, with the
    reason.
    """
    steps = _Steps()
    with ctx.store.reading() as rows:
        disks = rows.disks_of(operation.id)
        snapshots = rows.snapshots_of(operation.id)
    domain = operation.row.detail.get("domain")
    if domain is not None:
        # It writes into a file that goes with the operation: no harm but the work.
        steps.run(
            f"backup job of guest {domain}",
            lambda: _abort_guest_job(ctx, str(domain)),
            once=True,
        )
    steps.run("half of an image", lambda: _discard_upload(ctx, operation))
    # A temporary volume hangs on the snapshot that it was made from.
    steps.findings += pay_debts(ctx, operation.id)
    for snapshot in snapshots:
        steps.run(
            f"half of an image from snapshot {snapshot.id}",
            functools.partial(_withdraw, ctx, operation, snapshot.id),
        )
        steps.run(
            f"snapshot {snapshot.id}",
            functools.partial(drop_snapshot, ctx, snapshot.id),
        )
    for disk in disks:
        step = functools.partial(_SETTLERS[disk.state], ctx, operation, disk)
        error = steps.run(f"disk {disk.id}", step)
        if error is not None and not isinstance(error, _LATER):
            _fail(ctx, disk.id, error)
    with ctx.store.reading() as rows:
        attachments = rows.attachments_of(operation.id)
    for attachment in attachments:
        steps.run(
            f"attachment of {attachment.generation_id}",
            functools.partial(ctx.disconnect, attachment),
        )
    steps.findings += pay_debts(ctx, operation.id)
    if not steps.again:
        with ctx.store.writing() as tx:
            _drop_empty_instance(operation, tx)
            operation.finish(tx)
    return steps.findings


#: What may go better the next time, with nobody changing the rows.
_LATER = (exc.StorageUnavailable, exc.StorageFull, exc.Busy, exc.HostError)


class _Steps:
    """Steps of which one that fails does not keep the others from being tried."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.again = False

    def run(
        self, subject: str, step: Callable[[], str | None], *, once: bool = False
    ) -> exc.ImageBackendError | None:
        """The step's error, None if it went well.

        :param once: do not try it again for ever.
        """
        try:
            what = step()
        except exc.ImageBackendError as error:
            later = isinstance(error, _LATER) and not once
            self.again = self.again or later
            action = "will be tried again" if later else "left as it is"
            self.findings.append(
                Finding(Severity.ERROR, subject, error.message, action=action)
            )
            return error
        if what:
            self.findings.append(Finding(Severity.OK, subject, what))
        return None


def pay_debts(ctx: Context, operation_id: str) -> list[Finding]:
    """Purge the objects that an operation left without a disk.

    What cannot be purged yet stays a debt, of nobody in particular.
    """
    with ctx.store.reading() as rows:
        debts = [
            row for row in rows.debts(ctx.host.id) if row.operation_id == operation_id
        ]
    return purge(ctx, debts)


def purge(ctx: Context, debts: Sequence[GenerationRow]) -> list[Finding]:
    """Purge debts that no live operation is at."""
    findings = []
    for debt in debts:
        subject = f"object {debt.id} of {debt.backend}"
        try:
            _delete_object(ctx, debt)
            findings.append(Finding(Severity.OK, subject, "purged"))
        except exc.ImageBackendError as error:
            with ctx.store.writing() as tx:
                tx.update_generation(debt.id, reason=error.message, operation_id=None)
            LOG.warning("cannot purge %s yet: %s", debt.id, error)
            findings.append(_finding(subject, error))
    return findings


def drop_generation(ctx: Context, row: GenerationRow) -> None:
    """The object, with its attachments of this host, then its row.

    What the storage can purge only later leaves the disk, and is a debt from now on.
    """
    try:
        _delete_object(ctx, row)
    except exc.Debt as debt:
        LOG.warning("%s: it is a debt now", debt.message)
        with ctx.store.writing() as tx:
            tx.update_generation(
                row.id,
                state=GenerationState.DEBT,
                disk_id=None,
                operation_id=None,
                reason=debt.message,
            )


def _delete_object(ctx: Context, row: GenerationRow) -> None:
    with ctx.store.reading() as rows:
        attachments = rows.attachments(row.id)
        # A newer handle may have been recorded since the row was read.
        row = rows.generation(row.id) or row
    for attachment in attachments:
        ctx.disconnect(attachment)
    ctx.backend(row).delete(ctx.generation(row))
    with ctx.store.writing() as tx:
        tx.delete(row)


# --- one disk, by the state that it is in -------------------------------------


def _creating(ctx: Context, _operation: Operation, disk: DiskRow) -> str:
    with ctx.store.reading() as rows:
        generations = rows.generations(disk.id)
        owners = rows.owners(disk.id)
    for row in generations:
        drop_generation(ctx, row)
    with ctx.store.writing() as tx:
        tx.delete(*owners, disk)
    return "was being created: removed"


def _replacing(ctx: Context, operation: Operation, disk: DiskRow) -> str:
    if disk.reason == IN_PLACE:
        raise exc.IntegrityError(
            f"disk {disk.id} was being filled anew where it is, and has neither the "
            f"old content nor the new: rebuild its instance again",
            disk=disk.id,
        )
    with ctx.store.reading() as rows:
        generations = rows.generations(disk.id)
    for row in generations:
        if row.state is GenerationState.NEW and row.operation_id == operation.id:
            drop_generation(ctx, row)
    with ctx.store.writing() as tx:
        settle_disk(tx, disk)
    return "was being replaced: kept as it was"


def _resizing(ctx: Context, _operation: Operation, disk: DiskRow) -> str:
    """The storage's size decides."""
    with ctx.store.reading() as rows:
        row = rows.generation(disk.generation_id or "")
    if row is None:
        raise exc.InternalError(f"disk {disk.id} has no generation")
    found = ctx.backend(row).stat(ctx.generation(row))
    if found is None:
        raise exc.ObjectMissing(
            f"disk {disk.id}: its object is not in backend {row.backend!r} any more",
            disk=disk.id,
        )
    with ctx.store.writing() as tx:
        tx.update_generation(row.id, size=found.size)
        settle_disk(tx, disk, size=found.size)
    return f"was being resized: has {found.size} bytes"


def _connecting(ctx: Context, operation: Operation, disk: DiskRow) -> str:
    with ctx.store.reading() as rows:
        attachments = [
            row
            for row in rows.attachments_of(operation.id)
            if row.generation_id == disk.generation_id
        ]
    for attachment in attachments:
        ctx.disconnect(attachment)
    with ctx.store.writing() as tx:
        settle_disk(tx, disk)
    return "was being connected: disconnected"


def _snapshotting(ctx: Context, operation: Operation, disk: DiskRow) -> str:
    with ctx.store.reading() as rows:
        generations = rows.generations_of(operation.id)
    for row in generations:
        drop_generation(ctx, row)
    with ctx.store.writing() as tx:
        settle_disk(tx, disk)
    return "snapshot was being taken: dropped"


def _deleting(ctx: Context, _operation: Operation, disk: DiskRow) -> str:
    with ctx.store.reading() as rows:
        generations = rows.generations(disk.id)
        owners = rows.owners(disk.id)
    for row in generations:
        drop_generation(ctx, row)
    with ctx.store.writing() as tx:
        tx.delete(*owners, disk)
    return "was being deleted: gone"


_SETTLERS = {
    DiskState.CREATING: _creating,
    DiskState.REPLACING: _replacing,
    DiskState.RESIZING: _resizing,
    DiskState.CONNECTING: _connecting,
    DiskState.SNAPSHOTTING: _snapshotting,
    DiskState.DELETING: _deleting,
}


# --- the rest ------------------------------------------------------------------


def drop_snapshot(ctx: Context, snapshot_id: str) -> None:
    """The storage's snapshot, then its row."""
    with ctx.store.reading() as rows:
        row = rows.snapshot(snapshot_id)
        of = rows.generation(row.generation_id) if row else None
    if row is not None and of is not None:
        ctx.backend(of).delete_snapshot(ctx.generation(of), row.snapshot)
    if row is not None:
        with ctx.store.writing() as tx:
            tx.delete(row)


def _withdraw(ctx: Context, operation: Operation, snapshot_id: str) -> None:
    """What the storage put beside an image source that did not take it."""
    into = _into(operation)
    with ctx.store.reading() as rows:
        row = rows.snapshot(snapshot_id)
        of = rows.generation(row.generation_id) if row else None
    if into is None or row is None or of is None:
        return
    source = ctx.source_of(into.source)
    if source.takes_locations and not source.has(into):
        ctx.backend(of).withdraw(ctx.generation(of), row.snapshot, into)


def _into(operation: Operation) -> UploadTarget | None:
    """Where a snapshot was to go."""
    into = operation.row.detail.get("into")
    return into and model.from_json(UploadTarget, json.loads(into))


def _abort_guest_job(ctx: Context, domain: str) -> str | None:
    """A backup job goes on in libvirt when the process that began it has died."""
    return "ended" if guest.abort_leftover_job(ctx.conf, domain) else None


def _discard_upload(ctx: Context, operation: Operation) -> None:
    """An image that a dead snapshot had begun to hand over."""
    into = _into(operation)
    if into is not None:
        ctx.source_of(into.source).discard(into, operation.id)


def _drop_empty_instance(operation: Operation, tx: Transaction) -> None:
    instance = tx.instance(operation.row.target)
    if instance is not None and not tx.owned(instance.id):
        tx.delete(instance)


def _fail(ctx: Context, disk_id: str, error: exc.ImageBackendError) -> None:
    with ctx.store.writing() as tx:
        row = tx.disk(disk_id)
        if row is not None:
            settle_disk(tx, row, state=DiskState.FAILED, reason=error.message)
    LOG.error("disk %s failed: %s", disk_id, error)


def _finding(subject: str, error: exc.ImageBackendError) -> Finding:
    return Finding(Severity.ERROR, subject, error.message, action="left as it is")
