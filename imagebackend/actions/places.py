# SPDX-License-Identifier: Apache-2.0
"""Where disks of this host are recorded, against where its backends lead today.

A backend knows only its storage of now, the store only what was recorded: here the
two are compared, before anything is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from imagebackend import exceptions as exc
from imagebackend.actions.context import Context
from imagebackend.backends.loader import Backends
from imagebackend.model import (
    Finding,
    ImageInfo,
    Instance,
    Placement,
    Role,
    Severity,
    Want,
)
from imagebackend.selection import Recipe, Selection
from imagebackend.store.rows import GenerationRow


def place(
    ctx: Context,
    selection: Selection,
    recipe: Recipe,
    instance: Instance,
    image: ImageInfo | None,
) -> Placement:
    """Where the recipe's backend would make it. No effect.

    :raises StorageUnavailable: the storage looks new, but has disks: it is not the
        one that they are in.
    """
    placement = selection.place(recipe, instance, image)
    if not placement.new or not _recorded(ctx, placement):
        return placement
    # Asked again: the first disk of all may have been made just now.
    placement = selection.place(recipe, instance, image)
    recorded = _recorded(ctx, placement) if placement.new else []
    if recorded:
        scopes = ", ".join(sorted({row.scope for row in recorded}))
        raise exc.StorageUnavailable(
            f"backend {placement.backend!r}: {placement.new}, but disks are recorded "
            f"there, in {scopes}: mount or bring back what they are in; if it is lost "
            f"for good, choose another place for new disks",
            backend=placement.backend,
            scopes=scopes,
        )
    return placement


def must_answer(ctx: Context, rows: Iterable[GenerationRow]) -> None:
    """Ask the storages for the objects, before anything is touched: an operation that
    fails half way needs them to take back what it did.

    :raises HostError, StorageUnavailable: a backend is not enabled, leads elsewhere, or
        does not answer.
    """
    for row in rows:
        # What is damaged can be deleted; who would use it, is told by the backend.
        with contextlib.suppress(exc.IntegrityError):
            ctx.backend(row).stat(ctx.generation(row))


def must_be_whole(ctx: Context, rows: Iterable[GenerationRow]) -> None:
    """As :func:`must_answer`, for who is going to use what is in the objects.

    :raises IntegrityError: one is damaged, or what it is based on.
    """
    for row in rows:
        ctx.backend(row).stat(ctx.generation(row))
        ctx.must_have_base(row)


def lost(ctx: Context) -> Iterator[tuple[str, Finding]]:
    """Backends with disks of this host that none of their disks can be reached in."""
    with ctx.store.reading() as rows:
        recorded = rows.places(ctx.host.id)
    for row in recorded:
        try:
            ctx.backend(row).stat(ctx.generation(row))
        except (exc.HostError, exc.StorageUnavailable) as error:
            yield (
                row.backend,
                Finding(
                    Severity.ERROR,
                    f"backend {row.backend}",
                    error.message,
                    "the disks that are recorded there cannot be worked on until then",
                ),
            )
        except exc.ImageBackendError:
            pass  # it answers: what is wrong with one disk says nothing of the others


def forgotten(ctx: Context, backends: Backends) -> Iterator[Finding]:
    """A store without any disk, beside objects of other stores: one of them may have
    been this host's, and be lost.

    :param backends: ours, or some that need no store.
    """
    revision = ctx.store.database.revision()
    if revision is not None and next(ctx.store.generation_pages(), None) is not None:
        return
    mine = "" if revision is None else ctx.deployment_id
    said = {mine}
    for name in backends.names:
        # What is wrong with it is told elsewhere.
        with contextlib.suppress(exc.ImageBackendError):
            found = {each.marker for each in backends.get(name).scan()}
            others = {each.deployment_id for each in found if each} - said
            if others:
                said |= others
                yield Finding(
                    Severity.WARNING,
                    f"backend {name}",
                    f"has objects of deployment {', '.join(sorted(others))}, and the "
                    f"store has no disk at all",
                    "if no other host made them, this host's store was lost: restore "
                    "it from a backup",
                )


def _recorded(ctx: Context, placement: Placement) -> list[GenerationRow]:
    """What says that the place is not new; two backends may have one place."""
    with ctx.store.reading() as rows:
        recorded = rows.places(ctx.host.id)
    return [
        row
        for row in recorded
        if row.scope != placement.scope
        and (row.backend == placement.backend or _same(ctx, row.backend, placement))
    ]


def _same(ctx: Context, name: str, placement: Placement) -> bool:
    want = Want(placement.size, role=Role.ROOT, instance_id=None, project_id="")
    # One that cannot say where it would put a disk hinders no other.
    with contextlib.suppress(exc.ImageBackendError):
        return ctx.backends.get(name).plan(want).new == placement.new
    return False
