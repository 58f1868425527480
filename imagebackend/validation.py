# SPDX-License-Identifier: Apache-2.0
"""What is acceptable in a request, whatever the host: types, names, ids, sizes, keys.

Every refusal names the thing, its value, and what would be right.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import os
import re
import types
import typing
import unicodedata
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from imagebackend import exceptions as exc
from imagebackend.model import (
    DiskSpec,
    Flavor,
    GiB,
    Instance,
    KiB,
    MiB,
    Role,
    UploadTarget,
)

PREFIX = "imagebackend:"
QUOTA_PREFIX = "quota:disk_"
QUOTA_KEYS = tuple(
    f"{QUOTA_PREFIX}{way}_{unit}_sec"
    for way in ("read", "write", "total")
    for unit in ("bytes", "iops")
)
FLAVOR_KEYS = tuple(
    f"{PREFIX}{prefix}{choice}"
    for prefix in ("", "ephemeral_", "swap_")
    for choice in ("backend", "volume_type", "pool")
)
BUSES = ("virtio", "scsi", "sata", "ide", "usb")
#: Stands for the host's default file system, or Windows' own.
DEFAULT_FS = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
#: Longest label that each can have.
_LABELS = {"ext4": 16, "xfs": 12, "vfat": 11, "swap": 16}
#: Smallest disk that each can be made on, as its tools of today say.
_SMALLEST = {"ext4": 256 * KiB, "xfs": 300 * MiB, "vfat": 64 * KiB, "swap": 40 * KiB}
#: Control characters, halves of characters, ends of lines: Unicode's categories.
_NOT_TEXT = ("Cc", "Cs", "Zl", "Zp")
_MAX_SIZE = 2**63 - 1  # of a file on Linux, and of a number in the store
_MAX_QUOTA = 10**15  # QEMU's own
_MAX_CONFIG_DRIVE = 256 * MiB
_MAX_DISKS = 256
_CONTENTS = ("image", "base", "disk", "path")


def check_id(what: str, value: object) -> str:
    """:raises InvalidValue: not a uuid as OpenStack and libvirt write it."""
    try:
        if isinstance(value, str) and str(uuid.UUID(value)) == value:
            return value
    except ValueError:
        pass
    raise exc.InvalidValue(
        what,
        value,
        "the text of a uuid, in lower case and with dashes, as "
        "8be4df61-93ca-11d2-aa0d-00e098032b8c",
    )


def check_instance(instance: Instance) -> None:
    """:raises InvalidValue: an id, text or number of it is not acceptable."""
    _check_types("instance", instance, Instance)
    check_id("instance id", instance.id)
    for what, text in (
        ("project id", instance.project_id),
        ("name of the instance", instance.name),
        ("availability zone", instance.availability_zone or ""),
    ):
        _check_text(what, text)
    if instance.image is not None:
        _check_text("image of the instance", instance.image, empty=False)
    flavor = instance.flavor
    if flavor is None:
        return
    _check_text("name of the flavor", flavor.name)
    for name, unit in (("root_gb", GiB), ("ephemeral_gb", GiB), ("swap_mb", MiB)):
        number = getattr(flavor, name)
        if not 0 <= number * unit <= _MAX_SIZE:
            raise exc.InvalidValue(
                f"{name} of flavor {flavor.name!r}",
                number,
                f"a whole number from 0 to {_MAX_SIZE // unit}",
            )


def check_target(into: object) -> None:
    """:raises InvalidValue: not where a snapshot can go."""
    _check_types("target of the snapshot", into, UploadTarget)


def spec_list(disks: object) -> list[DiskSpec]:
    """The caller's specs, from anything that gives them one by one.

    :raises InvalidValue: it gives none.
    """
    if not isinstance(disks, Iterable):
        raise exc.InvalidValue("disks", disks, "a sequence of DiskSpec")
    # One more than may be, so that too many are seen; there may be no end of them.
    return list(itertools.islice(disks, _MAX_DISKS + 1))


def _check_text(what: str, text: str, *, empty: bool = True) -> None:
    if not printable(text) or len(text) > 255 or not (empty or text):
        least = 0 if empty else 1
        raise exc.InvalidValue(what, text, f"printable, of {least} to 255 characters")


def printable(text: str) -> bool:
    """Whether it can be shown, stored, and written into XML."""
    return text.isprintable() or not any(
        unicodedata.category(each) in _NOT_TEXT for each in text
    )


def check_flavor(flavor: Flavor | None, override: bool) -> None:
    """Extra specs.

    :param override: whether a flavor may choose the backend on this host.
    :raises PlacementRefused: a key that is not known, or not allowed here.
    :raises InvalidValue: a value that cannot be.
    """
    if flavor is None:
        return
    for key, value in flavor.extra_specs.items():
        where = f"extra spec {key!r} of flavor {flavor.name!r}"
        if key in QUOTA_KEYS:
            if not re.fullmatch(r"[0-9]{1,16}", value) or int(value) > _MAX_QUOTA:
                raise exc.InvalidValue(
                    where, value, f"a whole number from 0 to {_MAX_QUOTA}"
                )
        elif key == "hw:ephemeral_encryption" and truth(value):
            raise exc.PlacementRefused(
                f"flavor {flavor.name!r} has {key!r} {value!r}, which asks for "
                f"encrypted disks: this version cannot make them; use a volume type "
                f"that encrypts, or a flavor without the key",
                flavor=flavor.name,
                key=key,
            )
        elif key.startswith(PREFIX):
            _check_key(flavor, key, override)
            _check_text(where, value, empty=False)
    for unit in ("bytes", "iops"):
        keys = [f"{QUOTA_PREFIX}{way}_{unit}_sec" for way in ("read", "write")]
        total = f"{QUOTA_PREFIX}total_{unit}_sec"
        parts = [key for key in keys if int(flavor.extra_specs.get(key, 0))]
        if parts and int(flavor.extra_specs.get(total, 0)):
            raise exc.InvalidValue(
                f"extra specs of flavor {flavor.name!r}",
                [total, *parts],
                "either the total or read and write: QEMU cannot have both",
            )


def _check_key(flavor: Flavor, key: str, override: bool) -> None:
    if key not in FLAVOR_KEYS:
        raise exc.PlacementRefused(
            f"flavor {flavor.name!r} has the unknown extra spec {key!r}: known are "
            f"{', '.join(FLAVOR_KEYS)}",
            flavor=flavor.name,
            key=key,
        )
    if not override:
        raise exc.PlacementRefused(
            f"flavor {flavor.name!r} has {key!r}, but [imagebackend] "
            f"allow_flavor_override is off on this host",
            flavor=flavor.name,
            key=key,
        )


def check_specs(disks: Sequence[DiskSpec]) -> None:
    """What holds before names are derived. :raises InvalidValue:"""
    if len(disks) > _MAX_DISKS:
        raise exc.InvalidValue("number of disks", len(disks), f"at most {_MAX_DISKS}")
    existing: set[str] = set()
    for spec in disks:
        _check_types("disk", spec, DiskSpec)
        what = f"disk {spec.name or str(spec.role)!r}"
        if not 0 <= spec.size <= _MAX_SIZE:
            raise exc.InvalidValue(
                f"size of {what}",
                spec.size,
                f"a whole number of bytes from 0 to {_MAX_SIZE}",
            )
        if spec.role is Role.RESCUE:
            raise exc.InvalidValue(
                f"role of {what}", str(spec.role), "one that an instance is born with"
            )
        if spec.fs == DEFAULT_FS:
            raise _no_file_system(what, spec.fs)
        if spec.disk is not None and spec.disk in existing:
            raise exc.InvalidValue(
                f"id of the existing disk for {what}", spec.disk, "named once"
            )
        existing.add(spec.disk or "")


def _no_file_system(what: str, fs: str) -> exc.InvalidValue:
    return exc.InvalidValue(
        f"file system of {what}", fs, f"one of {', '.join(_SMALLEST)}"
    )


def truth(value: object) -> bool:
    """A property or extra spec that says yes, as OpenStack writes it."""
    return str(value).strip().lower() in ("1", "t", "true", "on", "y", "yes")


def check_spec(spec: DiskSpec) -> None:
    """One disk, with its name. :raises InvalidValue:"""
    what = f"disk {spec.name!r}"
    if not _NAME.fullmatch(spec.name):
        raise exc.InvalidValue(
            "name of a disk",
            spec.name,
            "at most 40 characters of a-z, 0-9, - and _, no - or _ first",
        )
    given = [key for key in _CONTENTS if getattr(spec, key) is not None]
    for key in ("image", "path", "backend", "pool", "volume_type"):
        text = getattr(spec, key)
        # A path may be as long as the kernel takes it.
        if text is not None and (key != "path" or not text):
            _check_text(f"{key} of {what}", text, empty=False)
    if len(given) > 1:
        raise exc.InvalidValue(
            f"content of {what}", given, f"one of {', '.join(_CONTENTS)}"
        )
    if not given and not spec.size:
        raise exc.InvalidValue(
            f"size of {what}", 0, f"given, or one of {', '.join(_CONTENTS)}"
        )
    if spec.disk is not None:
        check_id(f"id of the existing disk for {what}", spec.disk)
    if spec.base is not None:
        check_id(f"id of the base disk for {what}", spec.base)
    if spec.fs is not None and given:
        raise exc.InvalidValue(
            f"file system of {what}", spec.fs, f"left out beside {given[0]}"
        )
    _check_file_system(what, spec)
    if spec.role is Role.SWAP:
        _check_swap(what, spec, given)
    if spec.disk is not None:
        for key in ("size", "backend", "pool", "volume_type", "label"):
            if getattr(spec, key):
                raise exc.InvalidValue(
                    f"{key} of {what}",
                    getattr(spec, key),
                    "left out: the existing disk has its own",
                )
    if spec.path is not None:
        file_size(f"path of {what}", spec.path)


def _check_file_system(what: str, spec: DiskSpec) -> None:
    if spec.fs not in (None, DEFAULT_FS, *_SMALLEST):
        raise _no_file_system(what, str(spec.fs))
    least = _SMALLEST.get(spec.fs or "", 0)
    if spec.size < least:
        raise exc.SizeRefused(
            f"{what} has {spec.size} bytes: the file system {spec.fs} needs {least}",
            size=spec.size,
            needed=least,
        )
    longest = _LABELS.get(spec.fs or "", 16)
    label = spec.label
    if label is not None and not (
        re.fullmatch(r"[A-Za-z0-9_.-]{1,16}", label) and len(label) <= longest
    ):
        raise exc.InvalidValue(
            f"label of {what}", label, f"1 to {longest} of A-Z, a-z, 0-9, ., -, _"
        )


def _check_swap(what: str, spec: DiskSpec, given: Sequence[str]) -> None:
    if given and given != ["disk"]:
        raise exc.InvalidValue(
            f"content of {what}", given, "left out: swap space is blank"
        )
    if spec.fs not in (None, "swap"):
        raise exc.InvalidValue(f"file system of {what}", spec.fs, "swap")
    if spec.shareable:
        raise exc.InvalidValue(
            f"shareable of {what}", True, "false: two guests would swap onto each other"
        )


def file_size(what: str, path: str) -> int:
    """Bytes of a config drive. :raises InvalidValue: not a file that can be one."""
    if not os.path.isabs(path) or not printable(path):
        raise exc.InvalidValue(what, path, "an absolute path")
    if not os.path.isfile(path):
        raise exc.InvalidValue(what, path, "an existing file")
    size = os.path.getsize(path)
    if not 0 < size <= _MAX_CONFIG_DRIVE:
        raise exc.InvalidValue(
            f"size of {path}", size, f"between 1 and {_MAX_CONFIG_DRIVE} bytes"
        )
    return size


def file_digest(path: str) -> str:
    """:raises InvalidValue: the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise exc.InvalidValue(
            "file of a disk", path, f"readable ({error.strerror})"
        ) from error


# --- types --------------------------------------------------------------------


def _check_types(what: str, value: object, cls: Any) -> None:
    """A caller without a type checker may pass anything; it shall not get far."""
    if not isinstance(value, cls):
        raise exc.InvalidValue(what, value, f"of class {cls.__name__}")
    for name, hint in _hints(cls).items():
        found = getattr(value, name)
        if dataclasses.is_dataclass(found):
            _check_types(f"{name} of {what}", found, type(found))
        if not _fits(found, hint):
            raise exc.InvalidValue(f"{name} of {what}", found, _named(hint))


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def _fits(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return any(_fits(value, each) for each in typing.get_args(hint))
    if origin is not None:  # a mapping of texts
        return isinstance(value, Mapping) and all(
            isinstance(each, str) for pair in value.items() for each in pair
        )
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return isinstance(value, hint)
    # bool is an int to Python, not to anybody who asks for a size.
    return type(value) is hint or (hint is str and isinstance(value, str))


def _named(hint: Any) -> str:
    if typing.get_origin(hint) is types.UnionType:
        names = [_named(each) for each in typing.get_args(hint)]
        return " or ".join(names)
    if typing.get_origin(hint) is not None:
        return "a mapping of texts to texts"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = [each for each in hint if each is not Role.RESCUE]
        return "one of " + ", ".join(f"{hint.__name__}.{each.name}" for each in members)
    kinds = {int: "a whole number", str: "text", bool: "true or false"}
    if hint is type(None):
        return "None"
    return kinds.get(hint, f"of class {hint.__name__}")
