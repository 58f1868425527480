# SPDX-License-Identifier: Apache-2.0
"""connect and disconnect: this host's way to an instance's disks; their XML."""

from __future__ import annotations

from collections.abc import Sequence

from imagebackend import exceptions as exc
from imagebackend.actions.context import (
    Context,
    free,
    hold,
    instance_of,
    settle_disk,
)
from imagebackend.actions.places import must_be_whole
from imagebackend.actions.replace import known_instance, must_be_idle, release
from imagebackend.actions.settle import begin
from imagebackend.libvirt import secret as secrets
from imagebackend.libvirt.xml import DiskDevice, disk_xml
from imagebackend.model import Connection, DiskState, Instance, Role
from imagebackend.store.rows import AttachmentRow, DiskRow, GenerationRow, Reader
from imagebackend.validation import QUOTA_KEYS, QUOTA_PREFIX


def connect(ctx: Context, instance_id: str) -> Sequence[Connection]:
    """See :meth:`imagebackend.manager.DiskManager.connect`."""
    with begin(ctx, "connect", instance_id) as operation:
        with ctx.store.reading() as rows:
            present = []
            for _, disk in rows.owned(instance_id):
                present.append(_current(rows, free(disk, "connect")))
                _mine(ctx, rows, disk, instance_id)
        must_be_whole(ctx, present)
        with ctx.store.writing() as tx:
            known_instance(tx, instance_id)
            todo: list[tuple[GenerationRow, AttachmentRow]] = []
            for _, disk in tx.owned(instance_id):
                free(disk, "connect")
                row = _current(tx, disk)
                attachment = _mine(ctx, tx, disk, instance_id)
                if attachment is None:
                    attachment = AttachmentRow(
                        row.id,
                        ctx.host.id,
                        instance_id,
                        {},
                        operation_id=operation.id,
                        readonly=disk.cdrom,
                    )
                    tx.insert(attachment)
                    hold(tx, disk, DiskState.CONNECTING, operation)
                todo.append((row, attachment))
        connections = [ctx.connect(row, attachment) for row, attachment in todo]
        with ctx.store.writing() as tx:
            for attachment in tx.attachments_of(operation.id):
                tx.update_attachment(attachment, operation_id=None)
            for disk in tx.disks_of(operation.id):
                settle_disk(tx, disk)
            operation.finish(tx)
    return connections


def disconnect(ctx: Context, instance_id: str) -> None:
    """See :meth:`imagebackend.manager.DiskManager.disconnect`."""
    with begin(ctx, "disconnect", instance_id) as operation:
        with ctx.store.reading() as rows:
            known_instance(rows, instance_id)
            owned = rows.owned(instance_id)
        for owner, disk in owned:
            must_be_idle(ctx, disk, owner)
        for owner, disk in owned:
            release(ctx, disk, owner)
        with ctx.store.writing() as tx:
            operation.finish(tx)


def libvirt_xml(ctx: Context, instance_id: str) -> Sequence[str]:
    """See :meth:`imagebackend.manager.DiskManager.libvirt_xml`."""
    with ctx.store.reading() as rows:
        instance = instance_of(known_instance(rows, instance_id).request)
        found = []
        for owner, disk in rows.owned(instance_id):
            attachment = _mine(ctx, rows, disk, instance_id)
            if attachment is not None:
                found.append((owner, disk, _current(rows, disk), attachment))
    elements: list[str] = []
    for owner, disk, row, attachment in found:
        boots = disk.role in (Role.ROOT, Role.RESCUE)
        connection = ctx.connect(row, attachment)
        device = DiskDevice(
            serial=disk.id,
            bus=owner.bus,
            device=owner.device,
            cdrom=disk.cdrom,
            readonly=attachment.readonly,
            boot_order=1 if boots else None,
            shareable=disk.shareable,
            iotune=connection.limits or _iotune(instance),
        )
        for secret in ctx.backend(row).secrets(ctx.generation(row), connection):
            secrets.define(ctx.conf, secret)
        elements.append(disk_xml(device, connection, ctx.conf))
    return elements


def _current(rows: Reader, disk: DiskRow) -> GenerationRow:
    row = rows.generation(disk.generation_id or "")
    if row is None:
        raise exc.InternalError(f"disk {disk.id} is {disk.state}, but has no object")
    return row


def _mine(
    ctx: Context, rows: Reader, disk: DiskRow, instance_id: str
) -> AttachmentRow | None:
    """This host's attachment for the instance.

    :raises HostConflict: another host has the disk, and it is not shareable.
    """
    mine = None
    for each in rows.attachments(disk.generation_id or ""):
        if each.host_id == ctx.host.id:
            if each.instance_id == instance_id:
                mine = each
        elif not disk.shareable:
            raise exc.HostConflict(
                f"disk {disk.id} is connected to host {rows.host_name(each.host_id)}: "
                f"one host at a time, unless it is shareable",
                disk=disk.id,
                host=each.host_id,
            )
    return mine


def _iotune(instance: Instance) -> dict[str, int]:
    if instance.flavor is None:
        return {}
    specs = instance.flavor.extra_specs
    return {
        key.removeprefix(QUOTA_PREFIX): int(specs[key])
        for key in QUOTA_KEYS
        if key in specs
    }
