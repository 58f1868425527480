# SPDX-License-Identifier: Apache-2.0
"""The disks that a request asks for: those it lists, and those that follow from its
flavor and image. Nothing here knows the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from imagebackend import exceptions as exc
from imagebackend.model import DiskSpec, Flavor, GiB, Instance, Lifecycle, MiB, Role
from imagebackend.validation import DEFAULT_FS


def specs_of(instance: Instance, disks: Sequence[DiskSpec]) -> list[DiskSpec]:
    """All disks of the instance, root first, each with a name of its own."""
    return _with_names(_with_flavor(instance, disks))


def _with_flavor(instance: Instance, disks: Sequence[DiskSpec]) -> list[DiskSpec]:
    """The caller's specs, and those that follow from flavor and image."""
    flavor = instance.flavor
    roots = [spec for spec in disks if spec.role is Role.ROOT]
    if len(roots) > 1:
        raise exc.InvalidValue("disks", [spec.name for spec in roots], "of one root")
    specs: list[DiskSpec] = []
    if roots:
        specs.append(roots[0])
    elif instance.image or (flavor and flavor.root_gb):
        size = flavor.root_gb * GiB if flavor else 0
        specs.append(DiskSpec(role=Role.ROOT, size=size, image=instance.image))
    others = [_formatted(spec) for spec in disks if spec.role is not Role.ROOT]
    if flavor:
        specs += _derived(flavor, others)
    return specs + others


def _formatted(spec: DiskSpec) -> DiskSpec:
    """A swap disk is of use only with swap on it."""
    blank = not (spec.image or spec.base or spec.disk or spec.path)
    if spec.role is Role.SWAP and blank and spec.fs is None:
        return dataclasses.replace(spec, fs="swap")
    return spec


def _derived(flavor: Flavor, others: Sequence[DiskSpec]) -> list[DiskSpec]:
    """Ephemeral and swap disks that the flavor has and nobody declared."""
    derived: list[DiskSpec] = []
    for role, total, spec in (
        (
            Role.EPHEMERAL,
            flavor.ephemeral_gb * GiB,
            DiskSpec(role=Role.EPHEMERAL, fs=DEFAULT_FS, label="ephemeral0"),
        ),
        (Role.SWAP, flavor.swap_mb * MiB, DiskSpec(role=Role.SWAP, fs="swap")),
    ):
        declared = any(
            other.role is role
            and other.lifecycle is Lifecycle.EPHEMERAL
            and not (other.disk or other.shareable)
            for other in others
        )
        if total and not declared:
            derived.append(dataclasses.replace(spec, size=total))
    return derived


def _with_names(specs: Iterable[DiskSpec]) -> list[DiskSpec]:
    taken: set[str] = set()
    named: list[DiskSpec] = []
    specs = list(specs)
    given = {spec.name for spec in specs if spec.name}
    for spec in specs:
        name = spec.name or _derived_name(spec.role, taken | given)
        if name in taken:
            raise exc.InvalidValue("name of a disk", name, "unique in its instance")
        taken.add(name)
        named.append(dataclasses.replace(spec, name=name))
    return named


def _derived_name(role: Role, taken: set[str]) -> str:
    names = [str(role)] if role is not Role.EPHEMERAL else []
    number = 0
    while True:
        for name in [*names, f"{role}{number}"]:
            if name not in taken:
                return name
        number += 1
