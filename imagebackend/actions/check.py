# SPDX-License-Identifier: Apache-2.0
"""check: can this host work as it is configured? Nothing here changes anything."""

from __future__ import annotations

import contextlib
import difflib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from imagebackend import conf as options
from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.actions import places
from imagebackend.actions.context import Context
from imagebackend.backends.loader import Backends, installed
from imagebackend.libvirt import guest, xml
from imagebackend.local_files import can_be_made, nearest
from imagebackend.model import (
    BackendStatus,
    Finding,
    Flavor,
    Instance,
    MiB,
    Severity,
)
from imagebackend.store.schema import REVISION


def backends(ctx: Context) -> Sequence[BackendStatus]:
    """See :meth:`imagebackend.manager.DiskManager.backends`."""
    found = []
    lost = _lost(ctx)
    backends = _without_store(ctx)
    for name in ctx.backends.names:
        findings: Sequence[Finding]
        try:
            findings = backends.get(name).check()
        except exc.ImageBackendError as error:
            findings = [Finding(Severity.ERROR, name, error.message)]
        said = {finding.what for finding in findings}
        more = [each for each in lost.pop(name, ()) if each.what not in said]
        findings = [*findings, *more]
        found.append(
            BackendStatus(name, ctx.backends.driver_name(name), True, findings)
        )
    for name, findings in lost.items():
        found.append(
            BackendStatus(name, ctx.backends.driver_name(name), False, findings)
        )
    used = {status.driver for status in found}
    found += [
        BackendStatus(driver, driver, False, ())
        for driver in installed()
        if driver not in used
    ]
    return found


def _without_store(ctx: Context) -> Backends:
    """Nothing is made here, so there may be no store to have the deployment's id, which
    no check needs."""
    return Backends(ctx.conf, lambda: "")


def _lost(ctx: Context) -> dict[str, list[Finding]]:
    """By backend; nothing without a store, whose own check says what is wrong."""
    found: dict[str, list[Finding]] = {}
    with contextlib.suppress(exc.ImageBackendError, OSError):
        if ctx.store.database.revision() == REVISION and ctx.host.known:
            for name, finding in places.lost(ctx):
                found.setdefault(name, []).append(finding)
    return found


def check(
    ctx: Context, flavors: Sequence[Flavor] = (), project_id: str = ""
) -> Iterator[Finding]:
    """See :meth:`imagebackend.manager.DiskManager.check`."""
    yield from _unknown_options(ctx)
    yield from _guarded("state path", lambda: _state_path(ctx))
    yield from _guarded("store", lambda: _store(ctx))
    yield from _guarded("defaults", lambda: _defaults(ctx))
    if any(True for _ in _guarded("backends", lambda: _names(ctx))):
        for status in backends(ctx):
            yield from status.findings
        # The store's own check says what is wrong with it.
        with contextlib.suppress(exc.ImageBackendError):
            yield from places.forgotten(ctx, _without_store(ctx))
    yield from _guarded("image source", lambda: _source(ctx))
    yield from _guarded("image cache", lambda: _cache(ctx))
    yield from _guarded("disk XML", lambda: _cache_modes(ctx))
    try:
        version = guest.version(ctx.conf)
        yield Finding(Severity.OK, "libvirt", f"answers, version {version}")
    except exc.ImageBackendError as error:
        yield Finding(
            Severity.WARNING,
            "libvirt",
            error.message,
            "needed only for running guests, and for the secrets of disks in Ceph",
        )
    if project_id:
        yield from _volume_types(ctx, project_id)
    for flavor in flavors:
        yield from _guarded(
            f"flavor {flavor.name}", partial(_places, ctx, flavor, project_id)
        )


def _volume_types(ctx: Context, project_id: str) -> Iterator[Finding]:
    """Which of them the project may use, where there are any."""
    backends = _without_store(ctx)
    for name in ctx.backends.names:
        with contextlib.suppress(exc.HostError):
            if ctx.backends.driver(name).VOLUME_TYPES:
                yield from _guarded(
                    f"project {project_id}",
                    partial(_usable_types, backends, name, project_id),
                )


def _usable_types(backends: Backends, name: str, project_id: str) -> str:
    types = ", ".join(sorted(backends.get(name).volume_types(project_id)))
    return f"may use volume types {types or 'of none'} of backend {name}"


def _places(ctx: Context, flavor: Flavor, project_id: str) -> str:
    """Where the disks would go, without an image."""
    instance = Instance(str(uuid.uuid4()), project_id, flavor=flavor)
    selection = ctx.selection(effects=False, backends=_without_store(ctx))
    found = []
    for wanted in selection.wanted(instance, ()):
        if wanted.recipe is not None:
            placement = selection.place(wanted.recipe, instance, None)
            kind = placement.handle.get("type_name") or placement.handle.get("pool")
            where = f"{placement.backend} ({kind})" if kind else placement.backend
            found.append(f"{wanted.name} {placement.size // MiB} MiB to {where}")
    return ", ".join(found) or "has no disks of a size of its own"


def _guarded(subject: str, check: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield Finding(Severity.OK, subject, check())
    except exc.ImageBackendError as error:
        yield Finding(Severity.ERROR, subject, error.message)
    except OSError as error:
        yield Finding(Severity.ERROR, subject, str(error))


def _unknown_options(ctx: Context) -> Iterator[Finding]:
    """oslo.config ignores what nobody has declared, as a name with a typing error."""
    known = options.names(ctx.conf)
    with contextlib.suppress(exc.ImageBackendError):
        for name in ctx.backends.names:
            with contextlib.suppress(exc.ImageBackendError):
                driver = ctx.backends.driver(name)
                known[name] = {
                    spelling
                    for option in (
                        options.backends.DRIVER,
                        *driver.OPTIONS,
                        *driver.chosen_options(ctx.conf, name),
                    )
                    for spelling in (option.name, option.dest)
                }
    for path, section, keys in options.sections(ctx.conf):
        where = f"[{section}] of {path}"
        if section in known:
            for key in sorted(set(keys) - known[section]):
                yield _unread(f"{where}: option {key}", key, known[section])
        elif section.startswith(f"{options.host.GROUP.name}_"):
            yield _unread(f"{where}: the group", section, known)


def _unread(subject: str, name: str, known: Iterable[str]) -> Finding:
    near = difflib.get_close_matches(name, known, 1)
    advice = f"did you mean {near[0]}?" if near else "remove it"
    return Finding(Severity.WARNING, subject, "is not known: nothing reads it", advice)


def _state_path(ctx: Context) -> str:
    path = ctx.host.state_path
    if not can_be_made(path):
        raise exc.ConfigError(
            f"{nearest(path)} is no folder that can be written to: let this user write "
            f"there, or set [imagebackend] state_path"
        )
    return path


def _store(ctx: Context) -> str:
    database = ctx.store.database
    revision = database.revision()
    if revision is None:
        return f"{database.name}: will be made at the first use"
    if revision != REVISION:
        what = "upgrade imagebackend on this host"
        if revision < REVISION:
            what = "run `imagebackend db upgrade`"
        raise exc.StoreError(
            f"{database.name} has schema {revision}, this version works with "
            f"{REVISION}: {what}"
        )
    damage = database.damage()
    if damage:
        raise exc.StoreError(f"{database.name} is damaged: {damage}")
    shared = "shared with other hosts" if database.shared else "of this host alone"
    return f"{database.name}: schema {revision}, {shared}"


def _names(ctx: Context) -> str:
    return ", ".join(ctx.backends.names)


def _defaults(ctx: Context) -> str:
    host = ctx.conf.imagebackend
    for option in ("default_backend", "ephemeral_backend", "swap_backend"):
        name = host[option]
        if name and name not in ctx.backends.names:
            raise exc.ConfigError(
                f"[imagebackend] {option} is {name!r}, which is not among "
                f"enabled_backends: {', '.join(ctx.backends.names)}"
            )
    return f"root disks go to backend {host.default_backend or ctx.backends.names[0]}"


def _source(ctx: Context) -> str:
    return f"{ctx.conf.imagebackend_images.source}: {ctx.source.check()}"


def _cache(ctx: Context) -> str:
    processes.require("qemu-img", "qemu-utils")
    path = ctx.cache.path
    if os.path.basename(path) == "_base":
        raise exc.ConfigError(
            f"[imagebackend_images] cache_path is {path}: Nova's cleaner would delete "
            f"what it does not know; choose another folder"
        )
    if not can_be_made(path):
        raise exc.ConfigError(
            f"{nearest(path)} is no folder that can be written to: let this user write "
            f"there, or set [imagebackend_images] cache_path"
        )
    return f"{path}: {ctx.cache.usage()} bytes"


def _cache_modes(ctx: Context) -> str:
    return ", ".join(
        f"{kind}={mode}" for kind, mode in xml.cache_modes(ctx.conf).items()
    )
