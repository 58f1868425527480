# SPDX-License-Identifier: Apache-2.0
"""Every exception that leaves this library.

The tree is small and is cut by *who can act*:

* :class:`RequestError`: the caller's request is wrong; asking again, or
  elsewhere, does not help.
* :class:`HostError`: this host is set up wrongly or is out of something; another
  host may do.
* :class:`StorageError`: the storage, or another operation, stands in the way;
  the same request may succeed later.
* :class:`InternalError`: a fault of this library.

``code`` is stable and meant for programs. The values that the message names are
kept in :attr:`ImageBackendError.values`. A message is one line; whatever was put
into it, it steers no terminal. No message holds a secret.
"""

from __future__ import annotations

import re
from typing import ClassVar

_LINE_END = re.compile(r"[ \t]*[\r\n]+[ \t]*")


class ImageBackendError(Exception):
    """The root of the tree.

    :param message: a sentence that reads well on its own: it names the thing,
        the value, and what would be right.
    :param values: the same facts for programs.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **values: object) -> None:
        super().__init__(_one_line(message))
        self.values = values

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        # From another process, whatever arguments the class takes.
        return _again, (type(self), self.args, self.values)


def _again(
    cls: type[ImageBackendError], args: tuple[object, ...], values: dict[str, object]
) -> ImageBackendError:
    error = cls.__new__(cls, *args)
    error.values = values
    return error


# --- the request -----------------------------------------------------------


class RequestError(ImageBackendError):
    """The request cannot be met as it stands, here or elsewhere."""

    code = "request"


class InvalidValue(RequestError):
    """A name, id, size or property that is not acceptable."""

    code = "invalid-value"

    def __init__(self, what: str, value: object, wanted: str) -> None:
        super().__init__(
            f"{what} is {_show(value)}: it must be {wanted}",
            what=what,
            value=value,
            wanted=wanted,
        )


class PlacementRefused(RequestError):
    """Flavor, image and host configuration do not lead to a place for a disk."""

    code = "placement-refused"


class SizeRefused(RequestError):
    """A disk would be too small for its content, shrink, or exceed a limit."""

    code = "size-refused"


class ImageRejected(RequestError):
    """The image is not what it claims, names other files, or is damaged."""

    code = "image-rejected"


class ImageNotFound(RequestError):
    """No image source knows the image, or the project may not use it."""

    code = "image-not-found"


class DiskNotFound(RequestError):
    """No row for this disk."""

    code = "disk-not-found"


class InstanceNotFound(RequestError):
    """No disk of this instance is recorded."""

    code = "instance-not-found"


class Conflict(RequestError):
    """The instance or disk exists already, with other properties."""

    code = "conflict"


class DiskInUse(RequestError):
    """A second owner asked for a disk that is not shareable."""

    code = "disk-in-use"


class NotSupported(RequestError):
    """The storage cannot do this; its capabilities said so."""

    code = "not-supported"


# --- this host -------------------------------------------------------------


class HostError(ImageBackendError):
    """This host is set up wrongly or lacks something; another one may do."""

    code = "host"


class ConfigError(HostError):
    """An option, or a combination of options, that cannot work."""

    code = "config"


class MissingDependency(HostError):
    """A program or an optional library is not installed."""

    code = "missing-dependency"


class NoSpace(HostError):
    """A file system of this host is full or read-only."""

    code = "no-space"


class LimitExceeded(HostError):
    """A child process hit a limit; the message names the option that sets it."""

    code = "limit-exceeded"


class HypervisorError(HostError):
    """libvirt or QEMU refused, or does not answer."""

    code = "hypervisor"


class StoreError(HostError):
    """The store cannot be used: damaged, of a newer schema, not reachable."""

    code = "store"


class StoreContended(StoreError):
    """The database gave this transaction up for another one's sake; nothing was
    changed, and the same call may work now."""

    code = "store-contended"


class StoreNotShared(HostError):
    """The verb needs a store that several hosts share, or exported rows."""

    code = "store-not-shared"


class HostConflict(HostError):
    """The thing belongs to another host."""

    code = "host-conflict"


# --- the storage -----------------------------------------------------------


class StorageError(ImageBackendError):
    """The storage failed, with its own reason."""

    code = "storage"


class StorageUnavailable(StorageError):
    """The storage or service does not answer: its state is unknown."""

    code = "storage-unavailable"


class Busy(StorageError):
    """Another operation, a guest or a watcher holds the thing."""

    code = "busy"


class Debt(Busy):
    """It has left its place, and what remains of it can be purged only later:
    something still hangs on it."""

    code = "debt"


class StorageFull(StorageError):
    """A pool, or the cluster, is full or at its quota."""

    code = "storage-full"


class ObjectExists(StorageError):
    """Something that is not ours has the name that we need; it was not touched."""

    code = "object-exists"


class ObjectMissing(StorageError):
    """The storage answered that an object which our rows name is not there."""

    code = "object-missing"


class IntegrityError(StorageError):
    """Bytes are not those that were promised: digest or length differ."""

    code = "integrity"


class Superseded(StorageError):
    """The row moved under this operation: another one owns the thing now."""

    code = "superseded"


# --- this library ----------------------------------------------------------


class InternalError(ImageBackendError):
    """A fault of this library: please report it."""

    code = "internal"


def _show(value: object, limit: int = 80) -> str:
    """The value for a message: quoted, no control characters, not endless."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print a number of thousands of digits
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= limit else text[:limit] + "…"


def _one_line(text: str) -> str:
    """Join lines; escape what is not for printing: control characters, halves of
    characters, marks that turn the direction of text."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in _LINE_END.sub(" ", text.strip())
    )
