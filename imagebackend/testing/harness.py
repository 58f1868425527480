# SPDX-License-Identifier: Apache-2.0
"""What the behaviour suite needs to know of a storage, and what it does to it."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from imagebackend import exceptions as exc
from imagebackend.backends.base import Backend, Blank, Fill, FromImage
from imagebackend.model import (
    CachedImage,
    Connector,
    Creation,
    Generation,
    GiB,
    Handle,
    ImageInfo,
    MiB,
    Placement,
    Role,
    Source,
    Want,
)
from imagebackend.qemu_img import image_opts


class Harness(abc.ABC):
    """A driver's author fills this in; the suite does the rest.

    :ivar folder: an empty folder of this host, for images.
    :ivar volume_type: what the suite's disks ask for, None where there are no types.
    :ivar size: bytes of the suite's disks: small, and one that the storage can do.
    """

    volume_type: str | None = None
    size: int = GiB

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.project_id = "project"

    @abc.abstractmethod
    def backend(self, deployment_id: str = "0123456789ab") -> Backend:
        """A new object on the same storage each time, as after a restart."""

    def plant(self, gen: Generation) -> bool:
        """Put something foreign where the generation's object would go. False: the
        storage gives the names, so that nothing can be in the way."""
        return False

    def lose_answer(self, request: str) -> bool:
        """Let the storage carry out the next such request (``create``, ``attach``,
        ``delete``, ``extend``), and its answer be lost. False: it cannot happen here.
        """
        return False

    def foreign(self) -> bool:
        """Put an object of somebody else's into the storage. False: cannot."""
        return False


@dataclass
class Recorder:
    """A ``record`` that remembers; fails as one whose operation was superseded.

    :ivar refuse_at: from which call on; 0: never.
    """

    handles: list[Handle] = field(default_factory=list)
    refuse_at: int = 0

    def __call__(self, handle: Handle) -> None:
        if self.refuse_at and len(self.handles) + 1 >= self.refuse_at:
            raise exc.Superseded("another operation owns the generation")
        self.handles.append(dict(handle))

    @property
    def last(self) -> Handle:
        return self.handles[-1]


@dataclass(frozen=True)
class FileImage:
    """An image that is in the cache already."""

    path: str
    format: str
    virtual_size: int
    fails: bool = False

    @property
    def info(self) -> ImageInfo:
        return ImageInfo(
            "image", self.format, self.path, virtual_size=self.virtual_size
        )

    @contextlib.contextmanager
    def cached(self) -> Iterator[CachedImage]:
        if self.fails:
            raise exc.IntegrityError("the image's bytes are not those promised")
        yield CachedImage("image-entry", self.path, self.format, self.virtual_size)


def image(
    harness: Harness, data: bytes, format_: str = "raw", *, fails: bool = False
) -> FileImage:
    """An image that a guest would read ``data`` from."""
    path = os.path.join(harness.folder, f"image-{uuid.uuid4()}.raw")
    with open(path, "xb") as file:
        file.write(data)
    os.chmod(path, 0o644)
    if format_ != "raw":
        raw, path = path, path.removesuffix("raw") + format_
        _run("qemu-img", "convert", "-f", "raw", "-O", format_, raw, path)
    return FileImage(path, format_, len(data), fails)


def connector(host: str = "host-1") -> Connector:
    return Connector(str(uuid.uuid5(uuid.NAMESPACE_DNS, host)), host)


def names_host(message: str, host: str = "host-1") -> bool:
    """A storage knows a host by its id, or by its name alone."""
    return connector(host).host_id in message or connector(host).hostname in message


def want(harness: Harness, fill: str = "Blank", **changes: Any) -> Want:
    values: dict[str, Any] = {
        "size": harness.size,
        "role": Role.ROOT,
        "instance_id": str(uuid.uuid4()),
        "project_id": harness.project_id,
        "volume_type": harness.volume_type,
        "fill": fill,
    }
    return Want(**(values | changes))


def generation(backend: Backend, wanted: Want, placement: Placement) -> Generation:
    """What the library would make of a placement."""
    return Generation(
        id=str(uuid.uuid4()),
        disk_id=str(uuid.uuid4()),
        disk_name="root",
        instance_id=wanted.instance_id,
        deployment_id=backend.deployment_id,
        project_id=wanted.project_id,
        backend=backend.name,
        scope=placement.scope,
        size=placement.size,
        format=placement.format,
        shareable=wanted.shareable,
        handle=placement.handle,
    )


def after(gen: Generation, creation: Creation) -> Generation:
    """The generation as its row has it once it is made."""
    return dataclasses.replace(
        gen,
        handle=creation.handle,
        size=creation.size,
        format=creation.format,
        scope=creation.scope or gen.scope,
    )


def recorded(gen: Generation, handle: Handle) -> Generation:
    """The generation as its row has it when only the handle was recorded."""
    return dataclasses.replace(gen, handle=handle)


def make(
    harness: Harness, backend: Backend, fill: Fill | None = None, **changes: Any
) -> Generation:
    """A disk, made as the library makes one."""
    fill = fill or Blank()
    if isinstance(fill, FromImage):
        changes.setdefault("image", fill.image.info)
    wanted = want(harness, type(fill).__name__, **changes)
    gen = generation(backend, wanted, backend.plan(wanted))
    return after(gen, backend.create(gen, fill, Recorder()))


@contextlib.contextmanager
def connected(
    backend: Backend, gen: Generation, host: str = "host-1"
) -> Iterator[Source]:
    connection = backend.connect(gen, connector(host), Recorder())
    try:
        yield connection.source
    finally:
        backend.disconnect(gen, connection)


def read(source: Source, offset: int = 0, length: int = MiB) -> bytes:
    """What a guest reads, told by QEMU's own tools."""
    target = os.path.join(tempfile.gettempdir(), f"read-{uuid.uuid4()}")
    try:
        _run(
            *("qemu-img", "dd", "-U", "--image-opts", f"bs={MiB}"),
            # It counts what it skips as well.
            *(f"skip={offset // MiB}", f"count={(offset + length) // MiB}"),
            *(f"if={image_opts(source)}", f"of={target}"),
        )
        with open(target, "rb") as file:
            return file.read(length)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)


def write(source: Source, pattern: int, offset: int = 0, length: int = MiB) -> None:
    """As a guest writes."""
    command = f"write -P {pattern} {offset} {length}"
    _run("qemu-io", "--image-opts", image_opts(source), "-c", command)


def write_file(source: Source, path: str, length: int) -> None:
    """A file's bytes onto the start of the disk, as a guest writes."""
    command = f"write -s {path} 0 {length}"
    _run("qemu-io", "--image-opts", image_opts(source), "-c", command)


def virtual_size(source: Source) -> int:
    """What QEMU takes for the disk's size."""
    out = _run("qemu-img", "map", "--output=json", "--image-opts", image_opts(source))
    last = json.loads(out)[-1]
    return int(last["start"]) + int(last["length"])


@contextlib.contextmanager
def in_use(source: Source) -> Iterator[None]:
    """Something has the disk open as a guest's QEMU has."""
    with subprocess.Popen(
        ["qemu-io", "--image-opts", image_opts(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("qemu-io has no pipes")
        process.stdin.write(b"length\n")
        process.stdin.flush()
        process.stdout.readline()
        try:
            yield
        finally:
            process.communicate(b"quit\n")


def _run(*argv: str) -> str:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(argv)}: {done.stderr}{done.stdout}")
    return done.stdout
