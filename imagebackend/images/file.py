# SPDX-License-Identifier: Apache-2.0
"""Images in a folder: ``<id>.<format>`` beside an optional ``<id>.json``.

The JSON object may have ``name``, ``digest`` (``sha512:<hex>``), ``virtual_size``
(bytes), ``min_disk_gb`` and ``properties``. The format is in the file's name, which
the operator gave; never in its bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.images.base import FORMATS, ImageSource, Readable
from imagebackend.local_files import copy_sparse, digest_of, fsync_path
from imagebackend.model import (
    JSON,
    ImageInfo,
    Progress,
    ProgressCallback,
    UploadTarget,
)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = "sha512"
#: As Linux has them, less the few that a name's ending takes.
_PATH_MAX, _NAME_MAX = 4000, 255


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """Where an upload goes, and what it is called on the way."""

    target: str
    part: str
    notes: str | None
    notes_part: str


class FileSource(ImageSource):
    """A folder that the operator fills, and that takes snapshots."""

    @property
    def folder(self) -> str:
        configured = self.conf.imagebackend_images.folder
        state: str = self.conf.imagebackend.state_path
        return os.path.abspath(configured or os.path.join(state, "images"))

    def get(
        self, image_id: str, *, auth: Any = None, project_id: str = ""
    ) -> ImageInfo:
        _check_id(image_id)
        paths = self._paths(image_id)
        if not paths:
            raise exc.ImageNotFound(
                f"image {image_id} is not in {self.folder}: it would be "
                f"{image_id}.<format>, format one of {', '.join(FORMATS)}",
                image=image_id,
                folder=self.folder,
            )
        if len(paths) > 1:
            raise exc.ImageRejected(
                f"image {image_id} is in {self.folder} as {' and as '.join(paths)}: "
                f"one id, one format",
                image=image_id,
                formats=list(paths),
            )
        ((format_, facts),) = paths.items()
        return self._info(image_id, format_, facts)

    @contextlib.contextmanager
    def open(self, info: ImageInfo, *, auth: Any = None) -> Iterator[Readable]:
        path = os.path.join(self.folder, f"{info.id}.{info.disk_format}")
        try:
            file = io.FileIO(path)
        except FileNotFoundError:
            raise exc.ImageNotFound(
                f"image {info.id} has left {self.folder}", image=info.id
            ) from None
        except OSError as error:
            raise _unreadable(path, error) from error
        with file:
            self._check_version(info, path, file.fileno())
            yield _Guarded(file, path)
            self._check_version(info, path, file.fileno())

    @staticmethod
    def _check_version(info: ImageInfo, path: str, fd: int) -> None:
        """Where there is no digest, nothing else tells two halves of two images."""
        if not info.digest and _version(os.fstat(fd)) != info.version:
            raise exc.IntegrityError(
                f"image {info.id} was replaced while it was asked for: {path}",
                image=info.id,
            )

    def check_target(self, into: UploadTarget) -> None:
        if into.disk_format not in FORMATS:
            raise exc.InvalidValue(
                "format of the image", into.disk_format, "one of " + ", ".join(FORMATS)
            )
        path = self._target(into)
        folder = os.path.dirname(path)
        taken = os.path.lexists(path)
        if not os.path.isabs(into.image):
            taken = taken or bool(self._paths(into.image))
        if taken:
            raise exc.Conflict(
                f"image {into.image} exists already: give another id", path=path
            )
        if os.path.isabs(into.image):
            if not os.path.isdir(folder):
                raise exc.InvalidValue(
                    "path of the image", path, "in a folder that exists"
                )
        else:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise processes.space_error(error, folder) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise exc.HostError(f"this process may not write to {folder}", path=folder)

    def put(
        self,
        into: UploadTarget,
        path: str,
        token: str,
        *,
        progress: ProgressCallback | None = None,
    ) -> ImageInfo:
        self.check_target(into)
        places = self._places(into, token)
        size = os.stat(path).st_size

        def seen(done: int) -> None:
            if progress is not None:
                progress(Progress("digest", done, size))

        digest = digest_of(path, _DIGEST, seen)
        try:
            _bring(path, places.part)
            if places.notes is not None:
                says = {"digest": digest, "properties": dict(into.properties)}
                _write(places.notes_part, json.dumps(says, indent=1, sort_keys=True))
                _link(places.notes_part, places.notes)
            # An image is there from the moment that its bytes are.
            _link(places.part, places.target)
            self._tidy(places)
            fsync_path(os.path.dirname(places.target))
        except OSError as error:
            self.discard(into, token)
            raise processes.space_error(error, places.target) from error
        except BaseException:
            self.discard(into, token)
            raise
        return ImageInfo(
            id=into.image,
            disk_format=into.disk_format,
            version=digest,
            size=size,
            digest=digest,
            properties=dict(into.properties),
        )

    def discard(self, into: UploadTarget, token: str) -> None:
        places = self._places(into, token)
        try:
            whole = _same(places.part, places.target)
            notes = places.notes
            if not whole and notes and _same(places.notes_part, notes):
                _remove(notes)
            self._tidy(places)
        except OSError as error:
            raise processes.space_error(error, places.part) from error

    @staticmethod
    def _tidy(places: _Places) -> None:
        # The notes first: while the bytes are there, they tell what was published.
        _remove(places.notes_part)
        _remove(places.part)

    def list(self) -> Iterator[ImageInfo]:
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            if self.conf.imagebackend_images.folder:
                raise exc.ConfigError(
                    f"[imagebackend_images] folder {self.folder} is not there: make "
                    f"it, or name the one that has the images",
                    path=self.folder,
                ) from None
            return
        except OSError as error:
            raise _unreadable(self.folder, error) from error
        for name in names:
            image_id, _, format_ = name.rpartition(".")
            if format_ in FORMATS and _ID.fullmatch(image_id):
                # One that is odd does not hide the others.
                try:
                    info = self.get(image_id)
                except (exc.RequestError, exc.StorageUnavailable):
                    continue
                yield info

    # --- parts ---------------------------------------------------------------

    def _target(self, into: UploadTarget) -> str:
        if os.path.isabs(into.image):
            if any(ord(char) < 32 for char in into.image):
                raise exc.InvalidValue(
                    "path of the image", into.image, "without control characters"
                )
            _check_path(into.image)
            return into.image
        _check_id(into.image)
        return os.path.join(self.folder, f"{into.image}.{into.disk_format}")

    def _paths(self, image_id: str) -> dict[str, os.stat_result]:
        """Formats that the folder has of the image."""
        found = {}
        for format_ in FORMATS:
            path = os.path.join(self.folder, f"{image_id}.{format_}")
            try:
                facts = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise _unreadable(path, error) from error
            if not stat.S_ISREG(facts.st_mode):
                raise exc.ImageRejected(
                    f"{path} is not a regular file: an image has to be one", path=path
                )
            found[format_] = facts
        return found

    def _info(self, image_id: str, format_: str, facts: os.stat_result) -> ImageInfo:
        path = os.path.join(self.folder, f"{image_id}.json")
        says = _metadata(path)
        digest = says.get("digest")
        virtual_size = says.get("virtual_size")
        if virtual_size is None and format_ in ("raw", "iso"):
            virtual_size = facts.st_size
        return ImageInfo(
            id=image_id,
            disk_format=format_,
            version=digest or _version(facts),
            name=says.get("name", ""),
            size=facts.st_size,
            virtual_size=virtual_size,
            digest=digest,
            min_disk_gb=says.get("min_disk_gb", 0),
            properties=says.get("properties", {}),
        )

    def _places(self, into: UploadTarget, token: str) -> _Places:
        target = self._target(into)
        folder, name = os.path.split(target)
        hidden = os.path.join(folder, f".{name}.{token}")
        outside = os.path.isabs(into.image)
        notes = None if outside else os.path.join(folder, f"{into.image}.json")
        return _Places(target, f"{hidden}.part", notes, f"{hidden}.notes")


class _Guarded:
    """Reads that fail in our words."""

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path

    def read(self, size: int, /) -> bytes:
        try:
            data: bytes = self._file.read(size)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        return data


def _check_id(image_id: object) -> None:
    if not isinstance(image_id, str) or not _ID.fullmatch(image_id):
        raise exc.InvalidValue(
            "image id",
            image_id,
            "letters, digits, dots, dashes and underscores, at most 128, and begin "
            "with a letter or digit",
        )


def _check_path(path: str) -> None:
    """What no file system takes is found before the work, not after it."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        raise exc.InvalidValue("path of the image", path, "in Unicode") from None
    if len(name) > _PATH_MAX or max(map(len, name.split(b"/"))) > _NAME_MAX:
        raise exc.InvalidValue(
            "path of the image",
            path,
            f"of at most {_PATH_MAX} bytes, each part of at most {_NAME_MAX}",
        )


def _metadata(path: str) -> JSON:
    try:
        with open(path, encoding="utf-8") as file:
            says = json.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise exc.ImageRejected(f"{path} is not JSON: {error}", path=path) from None
    kinds: Mapping[str, type] = {
        "name": str,
        "digest": str,
        "virtual_size": int,
        "min_disk_gb": int,
        "properties": dict,
    }
    if not isinstance(says, dict):
        raise exc.ImageRejected(f"{path} is not a JSON object", path=path)
    for key, value in says.items():
        kind = kinds.get(key)
        if kind is None or not isinstance(value, kind) or isinstance(value, bool):
            wanted = ", ".join(
                f"{name} ({kind.__name__})" for name, kind in kinds.items()
            )
            raise exc.ImageRejected(
                f"{path}: {key!r} with a value of type {type(value).__name__} is not "
                f"understood; there may be {wanted}",
                path=path,
            )
    for key in ("virtual_size", "min_disk_gb"):
        if says.get(key, 0) < 0:
            raise exc.ImageRejected(
                f"{path}: {key} is {says[key]}: it must not be negative", path=path
            )
    if "properties" in says:
        says["properties"] = {str(k): str(v) for k, v in says["properties"].items()}
    return says


def _version(facts: os.stat_result) -> str:
    return f"file:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}"


def _bring(path: str, part: str) -> None:
    """Another name for the file, or a copy of it on another file system; durable."""
    try:
        os.link(path, part)
    except OSError:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copy_sparse(path, fd)
        finally:
            os.close(fd)
    fsync_path(part)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _link(path: str, target: str) -> None:
    """Give the file its name, unless something has it."""
    try:
        os.link(path, target)
    except FileExistsError:
        raise exc.Conflict(f"{target} exists already", path=target) from None


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _unreadable(path: str, error: OSError) -> exc.StorageUnavailable:
    return exc.StorageUnavailable(
        f"cannot read {path}: {error.strerror or error}", path=path
    )
