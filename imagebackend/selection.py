# SPDX-License-Identifier: Apache-2.0
"""From what is wanted (flavor, image, disk specs, host configuration) to recipes
and placements. No effect: everything that can be refused is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.backends.loader import Backends
from imagebackend.model import (
    DiskSpec,
    GiB,
    ImageInfo,
    Instance,
    Lifecycle,
    MiB,
    Path,
    Placement,
    Role,
    Want,
)
from imagebackend.specs import specs_of
from imagebackend.validation import (
    BUSES,
    DEFAULT_FS,
    PREFIX,
    check_flavor,
    check_instance,
    check_spec,
    check_specs,
    file_digest,
    file_size,
    truth,
)

_CHOICES = ("backend", "volume_type", "pool")
_ROLE_PREFIX = {Role.EPHEMERAL: "ephemeral_", Role.SWAP: "swap_"}
_DEVICE_PREFIX = {"virtio": "vd", "scsi": "sd", "sata": "sd", "usb": "sd", "ide": "hd"}
#: Devices that a bus has room for, where that is few.
_ROOM = {"ide": 4}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything it takes to make a disk, resolved; recorded with it, so that it
    can be made again whatever the host's defaults are by then.

    :ivar size: bytes as asked for, before any rounding.
    :ivar digest: sha256 of the file at ``path``.
    :ivar quiesce: whether a running guest must flush its file systems before a
        snapshot, or there is none (image property ``os_require_quiesce``).
    """

    role: Role
    lifecycle: Lifecycle
    size: int
    backend: str
    pool: str | None = None
    volume_type: str | None = None
    image: str | None = None
    base: str | None = None
    path: str | None = None
    digest: str | None = None
    fs: str | None = None
    label: str | None = None
    shareable: bool = False
    cdrom: bool = False
    quiesce: bool = False

    @property
    def fill(self) -> str:
        """The name of the fill that it takes."""
        if self.image:
            return "FromImage"
        return "FromGeneration" if self.base or self.path else "Blank"

    def same_content(self, other: Recipe) -> bool:
        """Whether the disk would hold the same, whatever its size."""
        mine, theirs = (
            dataclasses.replace(each, size=0, quiesce=False) for each in (self, other)
        )
        return mine == theirs


@dataclass(frozen=True, slots=True)
class Wanted:
    """A disk that an instance shall have: one to make, or an existing one."""

    name: str
    bus: str
    recipe: Recipe | None
    disk_id: str | None = None
    image: ImageInfo | None = None
    why: str = ""


class Selection:
    """Chooses by this host's configuration.

    :param image: says what an image source knows of an image id, to a project.
    :param base: size in bytes of an existing disk, by its id and project.
    :param locations: where a storage may clone an image from.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        backends: Backends,
        image: Callable[[str, str], ImageInfo],
        base: Callable[[str, str], int],
        locations: Callable[[ImageInfo], Sequence[str]],
    ) -> None:
        self._conf = conf
        self._backends = backends
        self._image = image
        self._base = base
        self._locations = locations

    def wanted(self, instance: Instance, disks: Sequence[DiskSpec]) -> list[Wanted]:
        """All disks of the instance, root first.

        :raises RequestError: with flavor, key, value and what would be accepted.
        """
        check_instance(instance)
        check_flavor(instance.flavor, self._conf.imagebackend.allow_flavor_override)
        check_specs(disks)
        specs = specs_of(instance, disks)
        image = (
            self._image(instance.image, instance.project_id) if instance.image else None
        )
        wanted = [self._resolve(instance, spec, image) for spec in specs]
        _check_sums(instance, wanted)
        for bus, room in _ROOM.items():
            number = sum(each.bus == bus for each in wanted)
            if number > room:
                raise exc.InvalidValue(
                    f"number of disks on bus {bus}", number, f"at most {room}"
                )
        return wanted

    def resized(
        self, instance: Instance, disks: Sequence[DiskSpec], sizes: Mapping[str, int]
    ) -> list[Wanted]:
        """The disks at the sizes of the instance's new flavor. Needs no image: it may
        be gone by now.

        :param sizes: of the present disks, by name, for those that nothing sizes.
        """
        check_instance(instance)
        check_flavor(instance.flavor, self._conf.imagebackend.allow_flavor_override)
        result = []
        for spec in specs_of(instance, disks):
            if spec.disk:
                continue
            backend, pool, volume_type, why = self._choose(instance, spec, None)
            present = sizes.get(spec.name, 0)
            size = spec.size or present
            if size > present:
                self._limit(f"disk {spec.name!r} of instance {instance.id}", size)
            recipe = Recipe(
                spec.role,
                spec.lifecycle,
                size,
                backend,
                pool,
                volume_type,
                shareable=spec.shareable,
            )
            result.append(Wanted(spec.name, "", recipe, why=why))
        _check_sums(instance, result)
        return result

    def located(self, image: ImageInfo, backend: str) -> ImageInfo:
        """With its locations, if the backend can clone it from one."""
        if not self._backends.driver(backend).CLONES_IMAGES:
            return image
        return dataclasses.replace(image, locations=tuple(self._locations(image)))

    def place(
        self, recipe: Recipe, instance: Instance, image: ImageInfo | None
    ) -> Placement:
        """Where the recipe's backend would make it. No effect."""
        backend = self._backends.get(recipe.backend)
        placement = backend.plan(
            Want(
                size=recipe.size,
                role=recipe.role,
                instance_id=instance.id,
                project_id=instance.project_id,
                fill=recipe.fill,
                image=image,
                pool=recipe.pool,
                volume_type=recipe.volume_type,
                shareable=recipe.shareable,
                read_only=recipe.cdrom,
                availability_zone=instance.availability_zone,
            )
        )
        if (
            recipe.fill == "FromImage"
            and placement.path in (Path.COPY, Path.CONVERT)
            and self._conf.imagebackend.slow_path == "refuse"
        ):
            raise exc.PlacementRefused(
                f"backend {recipe.backend!r} would have to {placement.path} image "
                f"{recipe.image}, and [imagebackend] slow_path is refuse",
                backend=recipe.backend,
                image=recipe.image,
            )
        return placement

    # --- one disk ------------------------------------------------------------

    def _resolve(
        self, instance: Instance, spec: DiskSpec, root_image: ImageInfo | None
    ) -> Wanted:
        check_spec(spec)
        image = root_image
        if spec.image and (root_image is None or spec.image != root_image.id):
            image = self._image(spec.image, instance.project_id)
        elif not spec.image:
            image = None
        teller = root_image or image
        properties = teller.properties if teller else {}
        for each in (root_image, image):
            if each and truth(each.properties.get("hw_ephemeral_encryption")):
                raise exc.PlacementRefused(
                    f"instance {instance.id}: property hw_ephemeral_encryption of "
                    f"image {each.id} asks for encrypted disks, which this version "
                    f"cannot make: use a volume type that encrypts, or an image "
                    f"without the property",
                    image=each.id,
                )
        iso = image is not None and image.disk_format == "iso"
        cdrom = spec.cdrom or iso
        bus = self._bus(spec, cdrom, properties)
        if spec.disk:
            return Wanted(spec.name, bus, None, disk_id=spec.disk)
        backend, pool, volume_type, why = self._choose(instance, spec, root_image)
        if image is not None:
            image = self.located(image, backend)
        recipe = Recipe(
            role=spec.role,
            lifecycle=spec.lifecycle,
            size=self._size(instance, spec, image),
            backend=backend,
            pool=pool,
            volume_type=volume_type,
            image=spec.image,
            base=spec.base,
            path=spec.path,
            digest=file_digest(spec.path) if spec.path else None,
            fs=self._fs(spec, properties),
            label=spec.label,
            shareable=spec.shareable,
            cdrom=cdrom,
            quiesce=truth(properties.get("os_require_quiesce")),
        )
        return Wanted(spec.name, bus, recipe, image=image, why=why)

    def _size(self, instance: Instance, spec: DiskSpec, image: ImageInfo | None) -> int:
        name = f"disk {spec.name!r} of instance {instance.id}"
        needs = 0
        if image is not None:
            minimum = image.min_disk_gb * GiB
            # A disk of the image's own size has room for what the image asks for.
            if image.virtual_size:
                needs = (
                    image.virtual_size
                    if spec.size
                    else max(image.virtual_size, minimum)
                )
            if spec.size and spec.size < minimum:
                raise exc.SizeRefused(
                    f"{name} has {spec.size} bytes, but image {image.id} asks for "
                    f"min_disk {image.min_disk_gb} GiB",
                    size=spec.size,
                    needed=minimum,
                )
        elif spec.base:
            needs = self._base(spec.base, instance.project_id)
        elif spec.path:
            needs = file_size(f"path of disk {spec.name!r}", spec.path)
        size = spec.size or self._size_of_content(instance, spec, image, needs)
        if size < needs:
            raise exc.SizeRefused(
                f"{name} has {size} bytes, but its content needs {needs}",
                size=size,
                needed=needs,
            )
        self._limit(name, size)
        return size

    def _limit(self, name: str, size: int) -> None:
        limit = self._conf.imagebackend.max_disk_gb * GiB
        if size > limit:
            raise exc.SizeRefused(
                f"{name} would have {size} bytes: [imagebackend] max_disk_gb allows "
                f"{limit}",
                size=size,
                limit=limit,
            )

    def _size_of_content(
        self, instance: Instance, spec: DiskSpec, image: ImageInfo | None, needs: int
    ) -> int:
        if not needs:
            what = f"image {image.id} says nothing of" if image else "nothing says"
            raise exc.SizeRefused(
                f"disk {spec.name!r} of instance {instance.id} has no size, and {what} "
                f"its virtual size: give one",
            )
        if image is not None and spec.role is Role.ROOT and instance.flavor:
            limit = self._conf.imagebackend.max_image_root_gb
            if needs > limit * GiB:
                raise exc.SizeRefused(
                    f"neither flavor {instance.flavor.name!r} nor a disk's own size "
                    f"limits the root disk, and image {image.id} needs {needs} bytes: "
                    f"[imagebackend] max_image_root_gb allows {limit} GiB",
                    size=needs,
                    limit=limit * GiB,
                )
        return needs

    def _fs(self, spec: DiskSpec, properties: Mapping[str, str]) -> str | None:
        if spec.fs != DEFAULT_FS:
            return spec.fs
        if properties.get("os_type", "").lower() == "windows":
            return "vfat"
        default: str = self._conf.imagebackend.default_ephemeral_format
        return default

    def _bus(self, spec: DiskSpec, cdrom: bool, properties: Mapping[str, str]) -> str:
        key = "hw_cdrom_bus" if cdrom else "hw_disk_bus"
        what, found = f"bus of disk {spec.name!r}", spec.bus
        if found is None and properties.get(key) is not None:
            what, found = f"{what}, by image property {key},", properties[key]
        if found is None:
            default: str = self._conf.imagebackend.default_bus
            found = "sata" if cdrom else default
        allowed = ("scsi", "sata", "ide") if cdrom else BUSES
        if found not in allowed:
            raise exc.InvalidValue(what, found, "one of " + ", ".join(allowed))
        return found

    # --- the backend ---------------------------------------------------------

    def _choose(
        self, instance: Instance, spec: DiskSpec, root_image: ImageInfo | None
    ) -> tuple[str, str | None, str | None, str]:
        """Backend, pool, volume type, and who said so; the first that says anything
        of the place decides all of it."""
        prefix = _ROLE_PREFIX.get(spec.role, "")
        options: list[tuple[str, dict[str, str | None]]] = [
            (
                f"disk {spec.name!r}",
                {
                    "backend": spec.backend,
                    "volume_type": spec.volume_type,
                    "pool": spec.pool,
                },
            )
        ]
        if instance.flavor is not None:
            specs = instance.flavor.extra_specs
            for kind in dict.fromkeys((prefix, "")):
                options.append(
                    (
                        f"flavor {instance.flavor.name!r}",
                        {key: specs.get(PREFIX + kind + key) for key in _CHOICES},
                    )
                )
        if root_image and spec.role is Role.ROOT:
            property_ = root_image.properties.get("cinder_img_volume_type")
            if property_ and self._conf.imagebackend.allow_image_volume_type:
                options.append((f"image {root_image.id}", {"volume_type": property_}))
        for who, choice in options:
            if any(choice.values()):
                return (
                    self._backend_for(who, choice, spec.role),
                    choice.get("pool"),
                    choice.get("volume_type"),
                    who,
                )
        return self._default(spec.role), None, None, "host"

    def _backend_for(self, who: str, choice: dict[str, str | None], role: Role) -> str:
        name, volume_type = choice.get("backend"), choice.get("volume_type")
        if name is None and volume_type:
            return self._with_volume_types(who, volume_type)
        if name is None:
            return self._default(role)
        if name not in self._backends.names:
            raise exc.PlacementRefused(
                f"{who} asks for backend {name!r}, which is not enabled on this host: "
                f"[imagebackend] enabled_backends has "
                f"{', '.join(self._backends.names)}",
                backend=name,
                accepted=self._backends.names,
            )
        if volume_type and not self._backends.driver(name).VOLUME_TYPES:
            raise exc.PlacementRefused(
                f"{who} asks for volume type {volume_type!r} of backend {name!r}, "
                f"which has no volume types",
                backend=name,
                volume_type=volume_type,
            )
        return name

    def _with_volume_types(self, who: str, volume_type: str) -> str:
        """The first backend that has them; one that cannot be loaded hides no other."""
        broken: exc.HostError | None = None
        for name in self._backends.names:
            try:
                if self._backends.driver(name).VOLUME_TYPES:
                    return name
            except exc.HostError as error:
                broken = broken or error
        if broken is not None:
            raise broken
        raise exc.PlacementRefused(
            f"{who} asks for volume type {volume_type!r}, but no backend of this host "
            f"has volume types: {', '.join(self._backends.names)}",
            volume_type=volume_type,
        )

    def _default(self, role: Role) -> str:
        host = self._conf.imagebackend
        by_role = {
            Role.EPHEMERAL: ("ephemeral_backend", host.ephemeral_backend),
            Role.SWAP: ("swap_backend", host.swap_backend),
        }
        option, name = by_role.get(role, ("", None))
        if not name:
            option, name = "default_backend", host.default_backend
        if not name:
            return self._backends.names[0]
        if name not in self._backends.names:
            raise exc.ConfigError(
                f"[imagebackend] {option} is {name!r}, which is not among "
                f"enabled_backends: {', '.join(self._backends.names)}",
                option=option,
            )
        return str(name)


def _check_sums(instance: Instance, wanted: Iterable[Wanted]) -> None:
    """What was declared must fit into the flavor, in sum and at its real size.

    :raises SizeRefused:
    """
    flavor = instance.flavor
    if flavor is None:
        return
    limits = {
        Role.EPHEMERAL: (flavor.ephemeral_gb * GiB, "ephemeral_gb (--ephemeral-gb)"),
        Role.SWAP: (flavor.swap_mb * MiB, "swap_mb (--swap-mb)"),
    }
    recipes = [each.recipe for each in wanted if each.recipe is not None]
    for role, (limit, option) in limits.items():
        asked = sum(
            recipe.size
            for recipe in recipes
            if recipe.role is role
            and recipe.lifecycle is Lifecycle.EPHEMERAL
            and not recipe.shareable
        )
        if asked > limit:
            raise exc.SizeRefused(
                f"instance {instance.id}: its {role} disks sum up to {asked} bytes, "
                f"flavor {flavor.name!r} allows {limit}: it needs more {option}, "
                f"or the disks are declared lifecycle=persistent",
                size=asked,
                limit=limit,
            )


def next_device(bus: str, taken: Iterable[str]) -> str:
    """The first free device name on the bus (``vda``, …, ``vdz``, ``vdaa``, …)."""
    used = set(taken)
    number = 0
    while True:
        name = _DEVICE_PREFIX[bus] + _letters(number)
        if name not in used:
            return name
        number += 1


def _letters(number: int) -> str:
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("a") + rest) + text
    return text
