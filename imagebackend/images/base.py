# SPDX-License-Identifier: Apache-2.0
"""The contract of an image source."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.model import ImageInfo, ProgressCallback, UploadTarget

#: Declared formats that can become a disk; ``iso`` only as a CD.
FORMATS = ("raw", "qcow2", "vmdk", "vhd", "vhdx", "vdi", "iso")


class Readable(Protocol):
    """A stream of an image's bytes."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; empty at the end."""
        ...


class ImageSource(abc.ABC):
    """Where images come from and snapshots go to.

    Keeps its argument, no effect. ``auth`` is the caller's keystoneauth plugin, for
    sources that must ask as the caller.
    """

    #: Whether :meth:`register` works.
    takes_locations: ClassVar[bool] = False

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self.conf = conf

    @abc.abstractmethod
    def get(
        self, image_id: str, *, auth: Any = None, project_id: str = ""
    ) -> ImageInfo:
        """What there is to know of an image.

        :param project_id: that must be allowed to use it where there is no ``auth``;
            empty: nobody in particular.
        :raises ImageNotFound: there is none, or the caller may not use it.
        """

    @abc.abstractmethod
    def open(
        self, info: ImageInfo, *, auth: Any = None
    ) -> AbstractContextManager[Readable]:
        """The image's bytes.

        :raises IntegrityError: it is another version by now.
        :raises StorageUnavailable: the source does not answer; worth another try.
        """

    def locations(
        self, info: ImageInfo, *, auth: Any = None, copy: bool = False
    ) -> Sequence[str]:
        """Where a storage may clone it from; empty: only :meth:`open` has it.

        :param copy: first bring it to where one can, if the operator wants that.
        """
        return ()

    @abc.abstractmethod
    def check_target(self, into: UploadTarget) -> None:
        """Refuse what :meth:`put` would refuse, before any work is done.

        :raises Conflict: the image is there already. :raises InvalidValue:
        """

    @abc.abstractmethod
    def put(
        self,
        into: UploadTarget,
        path: str,
        token: str,
        *,
        progress: ProgressCallback | None = None,
    ) -> ImageInfo:
        """Take the file at ``path`` as the image's bytes: whole or not at all.

        :param token: names this try, so that :meth:`discard` finds what a dead one
            left.
        """

    def register(self, into: UploadTarget, location: str, token: str) -> ImageInfo:
        """Take what a storage has put at ``location`` as the image's data.

        Only where :attr:`takes_locations` is true.
        """
        raise exc.NotSupported(f"this image source takes no location: {location}")

    def has(self, into: UploadTarget) -> bool:
        """Whether the image is there and whole."""
        return False

    @abc.abstractmethod
    def discard(self, into: UploadTarget, token: str) -> None:
        """Remove what a dead :meth:`put` left half made; an image that is whole
        stays. Nothing there is success."""

    @abc.abstractmethod
    def list(self) -> Iterator[ImageInfo]:
        """All images that the source itself can name."""

    def check(self) -> str:
        """What an operator wants to know of it. :raises HostError, StorageError:"""
        return f"{sum(1 for _ in self.list())} images"
