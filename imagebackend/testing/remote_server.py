# SPDX-License-Identifier: Apache-2.0
"""The server behind :mod:`imagebackend.testing.remote`: a folder, a lock, JSON.

Every request takes the lock, so that any number of processes see one server. Faults
stand in the same folder: a test sets them, whoever asks next meets them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from imagebackend import exceptions as exc
from imagebackend.model import FileSource


@dataclass(slots=True)
class Volume:
    """A volume as the server knows it.

    :ivar marker: what the client put on it.
    :ivar attachments: host id to attachment id.
    :ivar layers: files of its chain, the newest last: the first is raw, others are
        qcow2.
    """

    id: str
    type: str
    size: int
    marker: str | None
    created: float
    status: str = "creating"
    reason: str = ""
    filled: bool = False
    attachments: dict[str, str] = field(default_factory=dict)
    blocked: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)


class Faults:
    """What goes wrong next.

    ``lost``: the request is carried out, its answer is not heard. ``down``: it is not
    carried out. ``error``: a volume that is asked for ends in an error.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "faults.json")

    def set(self, request: str, kind: str, count: int = 1) -> None:
        """The next ``count`` requests of that name meet it."""
        faults = self._read()
        faults[request] = [kind] * count
        with open(self._path, "w") as file:
            json.dump(faults, file)

    def next(self, request: str) -> str:
        """The fault that the request meets now; empty: none."""
        faults = self._read()
        kinds = faults.get(request, [])
        if not kinds:
            return ""
        kind = str(kinds.pop())
        with open(self._path, "w") as file:
            json.dump(faults, file)
        return kind

    def _read(self) -> dict[str, list[str]]:
        try:
            with open(self._path) as file:
                found: dict[str, list[str]] = json.load(file)
                return found
        except FileNotFoundError:
            return {}


class Server:
    """Requests; each may raise :class:`~imagebackend.exceptions.StorageUnavailable`."""

    def __init__(self, folder: str, delay: float) -> None:
        self._folder = folder
        self._delay = delay

    @property
    def id(self) -> str:
        """Of this storage: two hosts that use it see the same."""
        with self._locked() as state:
            return str(state["id"])

    # --- volumes ---------------------------------------------------------------

    def create(self, marker: str, size: int, type_: str) -> Volume:
        with self._request("create") as (state, fault):
            volume = Volume(str(uuid.uuid4()), type_, size, marker, time.time())
            if fault == "error":
                volume.reason = "no backend has room for it"
            volume.layers = [volume.id]
            with open(os.path.join(self._folder, volume.id), "xb") as file:
                file.truncate(size)
            self._put(state, volume)
            return volume

    def get(self, volume_id: str) -> Volume | None:
        with self._request("get") as (state, _):
            return self._find(state, volume_id)

    def find_all(self, marker: str | None) -> list[Volume]:
        """All volumes, or those of a marker."""
        with self._request("find") as (state, _):
            found = [self._find(state, each) for each in state["volumes"]]
            return [each for each in found if each and marker in (None, each.marker)]

    def filled(self, volume_id: str) -> None:
        with self._request("filled") as (state, _):
            volume = self._must(state, volume_id)
            for layer in volume.layers:
                with open(os.path.join(self._folder, layer), "rb") as file:
                    os.fsync(file.fileno())
            volume.filled = True
            self._put(state, volume)

    def mark(self, volume_id: str, marker: str) -> Volume:
        with self._request("mark") as (state, _):
            volume = self._must(state, volume_id)
            if volume.marker not in (None, marker):
                raise exc.ObjectExists(f"volume {volume_id} is somebody else's")
            volume.marker, volume.filled = marker, True
            self._put(state, volume)
            return volume

    def delete(self, volume_id: str) -> None:
        with self._request("delete") as (state, _):
            volume = self._find(state, volume_id)
            if volume is None:
                return
            if volume.attachments:
                raise exc.Busy(f"volume {volume_id} is attached")
            snapshots = [
                name
                for name, each in state["snapshots"].items()
                if each["volume"] == volume_id
            ]
            if snapshots:
                raise exc.Busy(f"volume {volume_id} has snapshots {snapshots}")
            del state["volumes"][volume_id]
            for layer in volume.layers:
                os.unlink(os.path.join(self._folder, layer))

    def extend(self, volume_id: str, size: int) -> int:
        with self._request("extend") as (state, _):
            volume = self._must(state, volume_id)
            if size > volume.size:
                path = os.path.join(self._folder, volume.layers[-1])
                if len(volume.layers) == 1:
                    os.truncate(path, size)
                else:
                    _qemu_img("resize", "-q", "-f", "qcow2", path, str(size))
                volume.size = size
                self._put(state, volume)
            return volume.size

    # --- attachments -----------------------------------------------------------

    def attach(self, volume_id: str, host: str, shareable: bool) -> str:
        with self._request("attach") as (state, _):
            volume = self._must(state, volume_id)
            others = sorted(set(volume.attachments) - {host})
            if host in volume.blocked or (others and not shareable):
                raise exc.HostConflict(
                    f"volume {volume_id} is attached to host {', '.join(others)}, or "
                    f"host {host} was fenced",
                    hosts=others,
                )
            volume.attachments.setdefault(host, str(uuid.uuid4()))
            self._put(state, volume)
            return volume.attachments[host]

    def detach(self, volume_id: str, host: str) -> None:
        with self._request("detach") as (state, _):
            volume = self._find(state, volume_id)
            if volume is not None:
                volume.attachments.pop(host, None)
                self._put(state, volume)

    def block(self, volume_id: str, host: str) -> None:
        with self._request("block") as (state, _):
            volume = self._must(state, volume_id)
            volume.attachments.pop(host, None)
            volume.blocked = sorted({*volume.blocked, host})
            self._put(state, volume)

    def source(self, volume_id: str) -> FileSource:
        """How a host reaches it now."""
        with self._request("source") as (state, _):
            return self._chain(self._must(state, volume_id).layers)

    # --- snapshots ---------------------------------------------------------------

    def snapshot(self, volume_id: str, snapshot_id: str, *, overlay: bool) -> None:
        """By a copy, or by an overlay that takes all writes from now on."""
        with self._request("snapshot") as (state, _):
            volume = self._must(state, volume_id)
            if snapshot_id in state["snapshots"]:
                return
            layers = list(volume.layers)
            if overlay:
                name = f"{volume.id}.{len(volume.layers)}"
                below = self._chain(layers)
                _qemu_img(
                    *("create", "-q", "-f", "qcow2", "-F", below.format),
                    *("-b", below.path, os.path.join(self._folder, name)),
                )
                volume.layers.append(name)
                self._put(state, volume)
            else:
                layers = [f"snapshot-{snapshot_id}"]
                shutil.copyfile(
                    os.path.join(self._folder, volume.layers[0]),
                    os.path.join(self._folder, layers[0]),
                )
            state["snapshots"][snapshot_id] = {"volume": volume_id, "layers": layers}

    def snapshot_source(self, snapshot_id: str) -> FileSource:
        with self._locked() as state:
            return self._chain(state["snapshots"][snapshot_id]["layers"])

    def delete_snapshot(self, snapshot_id: str) -> None:
        with self._request("delete_snapshot") as (state, _):
            found = state["snapshots"].pop(snapshot_id, None)
            if found is None:
                return
            volume = self._find(state, found["volume"])
            for layer in found["layers"]:
                if volume is None or layer not in volume.layers:
                    os.unlink(os.path.join(self._folder, layer))

    def revert(self, volume_id: str, snapshot_id: str) -> None:
        with self._request("revert") as (state, _):
            volume = self._must(state, volume_id)
            (layer,) = state["snapshots"][snapshot_id]["layers"]
            path = os.path.join(self._folder, volume.layers[0])
            shutil.copyfile(os.path.join(self._folder, layer), path)
            volume.size = os.stat(path).st_size
            self._put(state, volume)

    # --- what a client on the same machine sees ------------------------------------

    def path(self, volume: Volume) -> str:
        return os.path.join(self._folder, volume.layers[-1])

    def allocated(self, volume: Volume) -> int:
        """Bytes that it takes up; one that has gone meanwhile: 0."""
        total = 0
        for layer in volume.layers:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(self._folder, layer)).st_blocks * 512
        return total

    # --- parts -----------------------------------------------------------------------

    def _chain(self, layers: list[str]) -> FileSource:
        source: FileSource | None = None
        for layer in layers:
            format_ = "raw" if source is None else "qcow2"
            source = FileSource(os.path.join(self._folder, layer), format_, source)
        assert source is not None
        return source

    def _find(self, state: dict[str, Any], volume_id: str) -> Volume | None:
        data = state["volumes"].get(volume_id)
        if data is None:
            return None
        volume = Volume(**data)
        if volume.status == "creating" and time.time() > volume.created + self._delay:
            volume.status = "error" if volume.reason else "available"
        return volume

    def _must(self, state: dict[str, Any], volume_id: str) -> Volume:
        volume = self._find(state, volume_id)
        if volume is None:
            raise exc.ObjectMissing(f"there is no volume {volume_id}", id=volume_id)
        return volume

    @staticmethod
    def _put(state: dict[str, Any], volume: Volume) -> None:
        state["volumes"][volume.id] = dataclasses.asdict(volume)

    @contextlib.contextmanager
    def _request(self, name: str) -> Iterator[tuple[dict[str, Any], str]]:
        with self._locked() as state:
            fault = Faults(self._folder).next(name)
            if fault == "down":
                raise exc.StorageUnavailable(f"the server is down: {name}")
            yield state, fault
        if fault == "lost":
            raise exc.StorageUnavailable(f"no answer came: {name}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        """The state, saved if nothing goes wrong."""
        path = os.path.join(self._folder, "state.json")
        os.makedirs(self._folder, exist_ok=True)
        with open(os.path.join(self._folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                with open(path) as file:
                    state = json.load(file)
            except FileNotFoundError:
                state = {"id": str(uuid.uuid4()), "volumes": {}, "snapshots": {}}
            yield state
            with open(f"{path}.new", "w") as file:
                json.dump(state, file)
            os.rename(f"{path}.new", path)


def _qemu_img(*argv: str) -> None:
    subprocess.run(["qemu-img", *argv], check=True)
