# SPDX-License-Identifier: Apache-2.0
"""prefetch and prune: the image cache, before and after it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from imagebackend.actions.context import Context
from imagebackend.images.cache import CacheEntry
from imagebackend.model import CachedImage, Finding, GiB, ProgressCallback


def entries(ctx: Context) -> Sequence[CacheEntry]:
    """See :meth:`imagebackend.manager.DiskManager.cache_entries`."""
    return list(ctx.cache.entries())


def prefetch(
    ctx: Context,
    image_id: str,
    *,
    auth: Any = None,
    progress: ProgressCallback | None = None,
) -> CachedImage:
    """See :meth:`imagebackend.manager.DiskManager.prefetch`."""
    return ctx.cache.prefetch(
        ctx.source,
        ctx.source.get(image_id, auth=auth),
        limit=ctx.conf.imagebackend.max_disk_gb * GiB,
        auth=auth,
        progress=progress,
    )


def prune(ctx: Context, *, dry_run: bool) -> Iterator[Finding]:
    """See :meth:`imagebackend.manager.DiskManager.prune`."""
    return ctx.cache.prune(dry_run=dry_run)


def forget_host(ctx: Context, host_id: str) -> None:
    """See :meth:`imagebackend.manager.DiskManager.forget_host`."""
    ctx.cache.forget_host(host_id)
