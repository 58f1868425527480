# SPDX-License-Identifier: Apache-2.0
"""One image from its source into a folder: streamed, digested, checked, converted."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import Any

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.images.base import ImageSource, Readable
from imagebackend.images.inspect import (
    Inspected,
    Verdict,
    check_blocks,
    rejected,
)
from imagebackend.local_files import ContentDigest, digest_of
from imagebackend.model import (
    FileSource,
    GiB,
    ImageInfo,
    MiB,
    Progress,
    ProgressCallback,
)
from imagebackend.qemu_img import QemuImg

_CHUNK = MiB


@dataclass(frozen=True, slots=True)
class Base:
    """What can be a backing file now."""

    file: str
    format: str
    virtual_size: int
    digest: str


def fetch(
    conf: cfg.ConfigOpts,
    source: ImageSource,
    info: ImageInfo,
    folder: str,
    *,
    limit: int,
    auth: Any = None,
    progress: ProgressCallback | None = None,
) -> Base:
    """:raises ImageRejected, IntegrityError, SizeRefused:"""
    options = conf.imagebackend_images
    if options.require_digest and not info.digest:
        raise exc.ImageRejected(
            f"image {info.id} has no digest, and [imagebackend_images] "
            f"require_digest is set",
            image=info.id,
        )
    most = options.max_image_gb * GiB
    if most and (info.size or 0) > most:
        raise _too_much(info, most)
    path = os.path.join(folder, "fetched")
    with source.open(info, auth=auth) as stream:
        verdict, digest = _download(stream, info, path, most, limit, progress)
    if verdict.virtual_size > limit:
        raise too_large(info, verdict.virtual_size, limit)
    qemu_img = QemuImg(conf)
    if verdict.driver != "raw":
        _check(qemu_img, info, FileSource(path, verdict.driver))
    as_it_came = verdict.driver == "raw" or (
        verdict.driver == "qcow2" and options.cache_format == "as-is"
    )
    if as_it_came:
        file = f"base.{verdict.driver}"
        os.rename(path, os.path.join(folder, file))
        format_ = verdict.driver
    else:
        file, format_ = "base.raw", "raw"
        _convert(qemu_img, info, path, verdict, os.path.join(folder, file), progress)
        os.unlink(path)
        digest = digest_of(os.path.join(folder, file))
    base = os.path.join(folder, file)
    virtual_size = os.stat(base).st_size if format_ == "raw" else verdict.virtual_size
    return Base(file, format_, virtual_size, digest)


def _download(
    stream: Readable,
    info: ImageInfo,
    path: str,
    most: int,
    limit: int,
    progress: ProgressCallback | None,
) -> tuple[Verdict, str]:
    """Its bytes, as they came, and a digest of them. A stream that goes on beyond
    what it may be is not followed to its end."""
    algorithm, _, wanted = (info.digest or "").partition(":")
    hasher = _hasher(info, algorithm, wanted) if info.digest else None
    content = ContentDigest()
    inspected = Inspected(stream, info)
    done = 0
    with open(path, "xb", buffering=0) as file:
        while chunk := inspected.read(_CHUNK):
            if hasher is not None:
                hasher.update(chunk)
            else:
                content.update(done, chunk)
            if chunk.count(0) == len(chunk):
                file.seek(len(chunk), os.SEEK_CUR)
            else:
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
            done += len(chunk)
            if most and done > most:
                raise _too_much(info, most)
            if info.size is not None and done > info.size:
                break
            if info.disk_format in ("raw", "iso") and done > limit:
                raise too_large(info, max(done, info.size or 0), limit)
            if progress is not None:
                progress(Progress("fetch image", done, info.size or 0))
        file.truncate(done)
    if info.size is not None and done != info.size:
        raise exc.IntegrityError(
            f"image {info.id}: {done} bytes came instead of {info.size}"
            + (", and more was to come" if done > info.size else ""),
            image=info.id,
            got=done,
            wanted=info.size,
        )
    if hasher is not None and hasher.hexdigest() != wanted.lower():
        raise exc.IntegrityError(
            f"image {info.id}: its bytes have {algorithm} {hasher.hexdigest()} "
            f"instead of {wanted}",
            image=info.id,
        )
    return inspected.verdict(), (info.digest or "").lower() or content.text(done)


def too_large(info: ImageInfo, needed: int, limit: int) -> exc.SizeRefused:
    """An image whose content does not fit."""
    return exc.SizeRefused(
        f"image {info.id} needs {needed} bytes, and there are {limit}",
        image=info.id,
        needed=needed,
        size=limit,
    )


def _too_much(info: ImageInfo, most: int) -> exc.SizeRefused:
    return exc.SizeRefused(
        f"image {info.id} has more than {most} bytes of data: "
        f"[imagebackend_images] max_image_gb",
        image=info.id,
        limit=most,
    )


def _hasher(info: ImageInfo, algorithm: str, wanted: str) -> hashlib._Hash:
    # MD5 and SHA-1 prove nothing against somebody who chose the image.
    if algorithm not in ("sha256", "sha384", "sha512"):
        raise exc.ImageRejected(
            f"image {info.id} has a digest of algorithm {algorithm!r}: it must be "
            f"sha256, sha384 or sha512",
            image=info.id,
            algorithm=algorithm,
        )
    hasher = hashlib.new(algorithm)
    digits = 2 * hasher.digest_size
    if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", wanted):
        raise exc.ImageRejected(
            f"image {info.id} has a digest that is none: after {algorithm}: there "
            f"must be {digits} hexadecimal digits",
            image=info.id,
            algorithm=algorithm,
        )
    return hasher


def _check(qemu_img: QemuImg, info: ImageInfo, source: FileSource) -> None:
    """What a torn file would have as zeros is found: by us, and by QEMU's own check
    of the image's tables."""
    check_blocks(info, source.path, source.format)
    try:
        fault = qemu_img.check(source)
    except exc.StorageError as error:
        raise _damaged(info, error) from error
    if fault:
        raise rejected(info, f"it is damaged: {fault}")


def _convert(
    qemu_img: QemuImg,
    info: ImageInfo,
    path: str,
    verdict: Verdict,
    target: str,
    progress: ProgressCallback | None,
) -> None:
    try:
        qemu_img.convert_to_file(
            FileSource(path, verdict.driver),
            target,
            "raw",
            progress=progress,
            what="convert image",
        )
    except exc.StorageError as error:
        if "writing" in str(error.values.get("reason")):
            raise
        raise _damaged(info, error) from error


def _damaged(info: ImageInfo, error: exc.StorageError) -> exc.ImageRejected:
    """QEMU cannot make sense of the file, which nobody else knows of."""
    return rejected(info, f"it is damaged: {error.values.get('reason') or error}")
