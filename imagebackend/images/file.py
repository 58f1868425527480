# SPDX-License-Identifier: Apache-2.0
"""Images in a folder: ``<id>.<format>`` beside an optional ``<id>.json``.

The JSON object may have ``name``, ``digest`` (``sha512:<hex>``), ``virtual_size``
(bytes), ``min_disk_gb`` and ``properties``. The format is in the file's name, which
the operator gave; never in its bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import stat
import uuid
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


class FileSource(ImageSource):
    """A folder that the operator fills, and that takes snapshots."""

    @property
    def folder(self) -> str:
        configured = self.conf.imagebackend_images.folder
        state: str = self.conf.imagebackend.state_path
        return os.path.abspath(configured or os.path.join(state, "images"))

    def get(self, image_id: str, *, auth: Any = None) -> ImageInfo:
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
            if not info.digest and _version(os.fstat(file.fileno())) != info.version:
                raise exc.IntegrityError(
                    f"image {info.id} was replaced while it was asked for: {path}",
                    image=info.id,
                )
            yield _Guarded(file, path)

    def check_target(self, into: UploadTarget) -> None:
        if into.source != "file":
            raise exc.InvalidValue(
                "image source of a snapshot", into.source, "file on this host"
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
        *,
        progress: ProgressCallback | None = None,
    ) -> ImageInfo:
        self.check_target(into)
        target = self._target(into)
        size = os.stat(path).st_size

        def seen(done: int) -> None:
            if progress is not None:
                progress(Progress("digest", done, size))

        digest = digest_of(path, _DIGEST, seen)
        part = os.path.join(os.path.dirname(target), f".{uuid.uuid4()}.part")
        sidecar = self._sidecar(into, digest)
        with contextlib.ExitStack() as undo:
            try:
                undo.callback(_remove, part)
                _bring(path, part)
                if sidecar is not None:
                    undo.callback(_remove, sidecar)
                with _exclusively(target):
                    os.link(part, target)
                _remove(part)
                fsync_path(os.path.dirname(target))
            except OSError as error:
                raise processes.space_error(error, target) from error
            undo.pop_all()
        facts = os.stat(target)
        return ImageInfo(
            id=into.image,
            disk_format=into.disk_format,
            version=digest,
            size=facts.st_size,
            digest=digest,
            properties=dict(into.properties),
        )

    def list(self) -> Iterator[ImageInfo]:
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return
        for name in names:
            image_id, _, format_ = name.rpartition(".")
            if format_ in FORMATS and _ID.fullmatch(image_id):
                with contextlib.suppress(exc.RequestError):
                    yield self.get(image_id)

    # --- parts ---------------------------------------------------------------

    def _target(self, into: UploadTarget) -> str:
        if os.path.isabs(into.image):
            if any(ord(char) < 32 for char in into.image):
                raise exc.InvalidValue(
                    "path of the image", into.image, "without control characters"
                )
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
            if stat.S_ISREG(facts.st_mode):
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

    def _sidecar(self, into: UploadTarget, digest: str) -> str | None:
        """Written first: an image is there from the moment that its bytes are."""
        if os.path.isabs(into.image):
            return None
        path = os.path.join(self.folder, f"{into.image}.json")
        says = {"digest": digest, "properties": dict(into.properties)}
        try:
            with _exclusively(path), open(path, "x", encoding="utf-8") as file:
                json.dump(says, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise processes.space_error(error, path) from error
        return path


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


def _metadata(path: str) -> JSON:
    try:
        with open(path, encoding="utf-8") as file:
            says = json.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
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


@contextlib.contextmanager
def _exclusively(path: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise exc.Conflict(f"{path} exists already", path=path) from None


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _unreadable(path: str, error: OSError) -> exc.StorageUnavailable:
    return exc.StorageUnavailable(
        f"cannot read {path}: {error.strerror or error}", path=path
    )
