# SPDX-License-Identifier: Apache-2.0
"""flatten: a disk gets its own copy of what it shares with an image or a disk."""

from __future__ import annotations

from imagebackend import exceptions as exc
from imagebackend.actions.context import Context, free
from imagebackend.actions.settle import begin
from imagebackend.model import ProgressCallback


def flatten(
    ctx: Context, disk_id: str, *, progress: ProgressCallback | None = None
) -> None:
    """See :meth:`imagebackend.manager.DiskManager.flatten`."""
    with ctx.store.reading() as rows:
        owners = rows.owners(disk_id)
    target = owners[0].instance_id if owners else disk_id
    with begin(ctx, "flatten", target) as operation:
        with ctx.store.reading() as rows:
            disk = rows.disk(disk_id)
            row = rows.generation(disk.generation_id or "") if disk else None
        if disk is None or row is None:
            raise exc.DiskNotFound(f"disk {disk_id} is not recorded", disk=disk_id)
        free(disk, "flatten")
        backend, generation = ctx.backend(row), ctx.generation(row)
        if not backend.capabilities(generation).flatten:
            raise exc.NotSupported(
                f"backend {row.backend!r} cannot flatten disk {disk_id}",
                backend=row.backend,
                disk=disk_id,
            )
        # Nothing changes for the disk: killed half way, it is as good as before.
        backend.flatten(generation, progress=progress)
        with ctx.store.writing() as tx:
            operation.finish(tx)
