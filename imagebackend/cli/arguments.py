# SPDX-License-Identifier: Apache-2.0
"""From words on the command line to what the manager takes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imagebackend.model import DiskSpec, Flavor

_SIZE = re.compile(r"(\d+)(?:([KMGT])(?:i?B)?)?", re.IGNORECASE | re.ASCII)
_FACTORS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SWITCH = {"": True, "true": True, "yes": True, "false": False, "no": False}
_NUMBERS = ("root_gb", "ephemeral_gb", "swap_mb")


def size(text: str) -> int:
    """Bytes, with or without a suffix (``10G``)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"size {text!r} must be a whole number of bytes, or have one of the "
            f"suffixes K, M, G, T (powers of 1024)"
        )
    return int(match[1]) * _FACTORS[(match[2] or "").upper()]


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def pair(text: str) -> tuple[str, str]:
    """``KEY=VALUE``."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE")
    return key, value


def _switch(text: str) -> bool:
    try:
        return _SWITCH[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be true or false, or left out for true"
        ) from None


#: What ``--disk`` understands, and how.
DISK_KEYS: Mapping[str, Callable[[str], Any]] = {
    "name": str,
    "size": size,
    "image": str,
    "base": str,
    "disk": str,
    "path": str,
    "role": str,
    "lifecycle": str,
    "shareable": _switch,
    "backend": str,
    "pool": str,
    "volume-type": str,
    "fs": str,
    "label": str,
    "bus": str,
    "cdrom": _switch,
}


def disk_spec(text: str) -> DiskSpec:
    """``KEY=VALUE,...``; a comma in a value is doubled, as QEMU does."""
    from imagebackend import exceptions as exc
    from imagebackend.model import DiskSpec, Role, from_json

    values: dict[str, Any] = {}
    # An argument of a process never contains a null character.
    for item in text.replace(",,", "\0").split(","):
        key, equals, value = item.replace("\0", ",").partition("=")
        key = key.replace("_", "-")
        read = DISK_KEYS.get(key)
        if read is None:
            raise argparse.ArgumentTypeError(
                f"{text!r}: {key!r} is not one of {', '.join(DISK_KEYS)}"
            )
        if read is not _switch and not value:
            raise argparse.ArgumentTypeError(f"{text!r}: {key} needs a value")
        if key.replace("-", "_") in values:
            raise argparse.ArgumentTypeError(f"{text!r}: {key} is there twice")
        values[key.replace("-", "_")] = read(value) if equals else read("")
    born = [str(role) for role in Role if role is not Role.RESCUE]
    if values.get("role", born[0]) not in born:
        raise argparse.ArgumentTypeError(
            f"{text!r}: role must be one of {', '.join(born)}"
        )
    try:
        return from_json(DiskSpec, values)
    except exc.InvalidValue as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


# --- flavors ------------------------------------------------------------------


def flavor_file(path: str) -> Flavor:
    """A flavor from a JSON file: ours, or what Nova and its clients show."""
    return _flavor(path, _json(path))


def flavors_file(path: str) -> list[Flavor]:
    """Several of them, as ``openstack flavor list --long -f json`` prints them; one is
    a list too."""
    says = _json(path)
    if isinstance(says, dict):
        says = says.get("flavors", [says])
    if not isinstance(says, list):
        raise argparse.ArgumentTypeError(f"{path} does not hold a JSON array")
    return [_flavor(path, each) for each in says]


def _json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot read {path}: {error.strerror or error}"
        ) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path} is not JSON: {error}") from None


def _flavor(path: str, says: Any) -> Flavor:
    from imagebackend.model import Flavor

    if not isinstance(says, dict):
        raise argparse.ArgumentTypeError(f"{path} does not hold a JSON object")
    # In a list the client writes Disk, in a single one disk.
    if "Disk" in says:
        says = {key.lower(): value for key, value in says.items()}
    values = _of_nova(says) if "disk" in says else dict(says)
    known = {field.name for field in dataclasses.fields(Flavor)}
    if set(values) - known:
        raise argparse.ArgumentTypeError(
            f"{path}: {', '.join(map(repr, sorted(set(values) - known)))} is not one "
            f"of {', '.join(sorted(known))}"
        )
    values.setdefault("name", path)
    _check_flavor(path, values)
    return Flavor(**values)


def _of_nova(says: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": says.get("name") or says.get("original_name") or "",
        "root_gb": says["disk"],
        "ephemeral_gb": says.get("OS-FLV-EXT-DATA:ephemeral", says.get("ephemeral", 0)),
        # Nova says "" for none.
        "swap_mb": says.get("swap") or 0,
        "extra_specs": says.get("extra_specs") or says.get("properties") or {},
    }


def _check_flavor(path: str, values: dict[str, Any]) -> None:
    for key in _NUMBERS:
        number = values.get(key, 0)
        if type(number) is not int or number < 0:
            raise argparse.ArgumentTypeError(
                f"{path}: {key} is {number!r}: it must be a whole number, 0 or more"
            )
    if not isinstance(values["name"], str):
        raise argparse.ArgumentTypeError(f"{path}: name must be a text")
    specs = values.get("extra_specs", {})
    if not isinstance(specs, dict):
        raise argparse.ArgumentTypeError(f"{path}: extra_specs must be an object")
    values["extra_specs"] = {str(key): str(value) for key, value in specs.items()}


def add_flavor(parser: argparse.ArgumentParser) -> None:
    """The options that say a flavor."""
    parser.add_argument(
        "--flavor-file",
        metavar="FILE",
        type=flavor_file,
        help="flavor: JSON object with name, root_gb, ephemeral_gb, swap_mb and "
        "extra_specs, or what `openstack flavor show -f json` prints",
    )
    parser.add_argument(
        "--root-gb",
        metavar="GB",
        type=whole,
        help="instead of a file: root disk, GiB; 0: the image's virtual size, if the "
        "host allows it",
    )
    parser.add_argument(
        "--ephemeral-gb", metavar="GB", type=whole, help="ephemeral disk, GiB"
    )
    parser.add_argument("--swap-mb", metavar="MB", type=whole, help="swap disk, MiB")
    parser.add_argument(
        "--extra-spec",
        metavar="KEY=VALUE",
        type=pair,
        action="append",
        default=[],
        dest="extra_specs",
        help="extra spec of the flavor, as imagebackend:backend=fast; repeatable",
    )


def flavor(parsed_args: argparse.Namespace, former: Flavor | None) -> Flavor | None:
    """The flavor that the options say; None if they say nothing.

    :param former: what single options change.
    :raises ValueError: a file and single options.
    """
    from imagebackend.model import Flavor

    given: dict[str, Any] = {
        key: getattr(parsed_args, key)
        for key in _NUMBERS
        if getattr(parsed_args, key) is not None
    }
    if parsed_args.flavor_file is not None:
        if given or parsed_args.extra_specs:
            raise ValueError("a flavor is in --flavor-file or in single options")
        found: Flavor = parsed_args.flavor_file
        return found
    if not given and not parsed_args.extra_specs:
        return None
    base = former or Flavor("of the command line")
    specs = dict(base.extra_specs) | dict(parsed_args.extra_specs)
    return dataclasses.replace(base, **given, extra_specs=specs)
