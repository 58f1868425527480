# SPDX-License-Identifier: Apache-2.0
"""The manager's verbs on a slow remote storage whose answers get lost.

The driver comes from a package of its own, found by its entry point, as a third
party's would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from stevedore import ExtensionManager

from imagebackend import DiskManager, DiskSpec, Instance, UploadTarget
from imagebackend import exceptions as exc
from imagebackend.model import FileSource, ProgressCallback, Severity
from imagebackend.testing.remote import Faults
from tests.conftest import GiB, HostUnderTest, MiB, read_disk
from tests.functional.test_verbs import connected, with_root, write

REQUESTS = (
    "create",
    "get",
    "find",
    "filled",
    "delete",
    "extend",
    "attach",
    "detach",
    "source",
    "snapshot",
    "delete_snapshot",
)


@pytest.fixture
def remote(
    host: HostUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HostUnderTest:
    """A host whose default is the remote storage."""
    package = tmp_path / "package"
    info = package / "slow_remote-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: slow-remote\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[imagebackend.backends]\n"
        "slow = imagebackend.testing.remote:SlowRemoteBackend\n"
    )
    monkeypatch.setattr(sys, "path", [str(package), *sys.path])
    # stevedore remembers what was installed when it first looked.
    monkeypatch.setattr(ExtensionManager, "ENTRY_POINT_CACHE", {})
    server = host.path / "server"
    server.mkdir()
    with host.config_file.open("a") as file:
        file.write(f"[far]\ndriver = slow\nfolder = {server}\ndelay = 0\n")
    host.conf.reload_config_files()
    host.set("enabled_backends", ["far", "qcow2"])
    return host


@pytest.fixture
def manager(remote: HostUnderTest) -> DiskManager:
    return remote.manager()


class FakeGuest:
    """What an action asks of a guest, written down."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.calls: list[str] = []

    def block_resize(self, serial: str, size: int) -> None:
        self.calls.append(f"resize {size}")

    def backup(
        self,
        files: Mapping[str, str],
        format_: str,
        *,
        quiesce: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.calls.append("backup")

    @contextlib.contextmanager
    def frozen(self, *, quiesce: bool = False) -> Iterator[None]:
        self.calls.append("freeze")
        try:
            yield
        finally:
            self.calls.append("thaw")


def volumes(host: HostUnderTest) -> dict[str, dict[str, object]]:
    """The server's own view."""
    state = json.loads((host.path / "server" / "state.json").read_text())
    assert state["snapshots"] == {}
    found: dict[str, dict[str, object]] = state["volumes"]
    files = {
        path.name
        for path in (host.path / "server").iterdir()
        if path.name not in ("state.json", "faults.json", "lock")
    }
    assert files == {layer for each in found.values() for layer in each["layers"]}  # type: ignore[attr-defined]
    return found


def agree(host: HostUnderTest, manager: DiskManager) -> None:
    """Rows and storage are equal, and nothing is left to do."""
    assert list(manager.recover(dry_run=True)) == []
    assert [each for each in manager.audit() if each.severity is not Severity.OK] == []
    disks = [disk for disk in manager.list() if disk.backend == "far"]
    found = volumes(host)
    assert {disk.handle["id"]: disk.size for disk in disks} == {
        name: each["size"] for name, each in found.items()
    }
    attached = {name for name, each in found.items() if each["attachments"]}
    assert attached == {disk.handle["id"] for disk in disks if disk.connected}


def test_the_flavor_names_the_volume_type_and_the_rest_follows(
    remote: HostUnderTest, manager: DiskManager
) -> None:
    data = remote.raw_image()
    remote.set("default_backend", "qcow2")
    instance = remote.instance(root_gb=1, swap_mb=64, imagebackend__volume_type="file")
    plan = manager.plan(instance)
    assert [each.placement.backend for each in plan.disks] == ["far", "far"]
    manager.create(instance)
    (root, swap) = manager.list(instance.id)
    assert (root.size, swap.size) == (GiB, GiB)  # whole GiB: the storage's
    assert {each["type"] for each in volumes(remote).values()} == {"file"}
    with connected(manager, instance.id) as (source, _):
        assert read_disk(source, 0, MiB) == data
        agree(remote, manager)
    agree(remote, manager)
    with pytest.raises(exc.PlacementRefused, match="no-such"):
        manager.create(remote.instance(imagebackend__volume_type="no-such"))
    manager.destroy(instance.id)
    assert volumes(remote) == {}


def test_growth_of_a_running_guest_is_the_storages_and_the_guest_is_told(
    remote: HostUnderTest, manager: DiskManager
) -> None:
    remote.raw_image()
    instance = remote.instance()
    manager.create(instance)
    manager.connect(instance.id)
    guest = FakeGuest(instance.id)
    manager.resize(with_root(instance, 2), guest)
    assert guest.calls == [f"resize {2 * GiB}"]
    agree(remote, manager)
    other = remote.instance(imagebackend__volume_type="plain")
    manager.create(other)
    manager.connect(other.id)
    with pytest.raises(exc.NotSupported, match="stop the guest"):
        manager.resize(with_root(other, 2), FakeGuest(other.id))
    agree(remote, manager)


def test_a_snapshot_by_the_storage_freezes_only_for_the_point_in_time(
    remote: HostUnderTest, manager: DiskManager
) -> None:
    data = remote.raw_image()
    instance = remote.instance()
    manager.create(instance)
    manager.connect(instance.id)
    guest = FakeGuest(instance.id)
    manager.snapshot(instance.id, UploadTarget("snap", "raw"), guest)
    assert guest.calls == ["freeze", "thaw"]
    assert (remote.images / "snap.raw").read_bytes()[:MiB] == data
    agree(remote, manager)
    files = remote.instance(imagebackend__volume_type="plain")
    manager.create(files)
    manager.connect(files.id)
    with pytest.raises(exc.NotSupported, match="stop the guest"):
        manager.snapshot(files.id, UploadTarget("other"), FakeGuest(files.id))
    agree(remote, manager)


def test_disks_of_two_backends_are_one_instances(
    remote: HostUnderTest, manager: DiskManager
) -> None:
    remote.raw_image()
    instance = remote.instance(ephemeral_gb=1, imagebackend__ephemeral_backend="qcow2")
    manager.create(instance)
    assert [disk.backend for disk in manager.list(instance.id)] == ["far", "qcow2"]
    second = remote.instance(ephemeral_gb=1, imagebackend__backend="qcow2")
    (_, ephemeral) = manager.list(instance.id)
    manager.create(second, [DiskSpec(name="copy", base=ephemeral.id, backend="far")])
    agree(remote, manager)
    manager.destroy(instance.id)
    manager.destroy(second.id)
    assert volumes(remote) == {} and remote.files() == []


def test_a_volume_that_ends_in_an_error_says_why_and_leaves_nothing(
    remote: HostUnderTest, manager: DiskManager
) -> None:
    remote.raw_image()
    Faults(str(remote.path / "server")).set("create", "error")
    with pytest.raises(exc.StorageError, match="no backend has room"):
        manager.create(remote.instance())
    assert volumes(remote) == {}
    agree(remote, manager)


Verb = Callable[[DiskManager, Instance], object]
VERBS: dict[str, Verb] = {
    "create": lambda manager, instance: manager.create(
        dataclasses.replace(instance, id="0b7a3a5e-6f0e-4c39-9d0e-0c54a5a5f2aa")
    ),
    "connect": lambda manager, instance: manager.connect(instance.id),
    "rebuild": lambda manager, instance: manager.rebuild(instance),
    "resize": lambda manager, instance: manager.resize(with_root(instance, 2)),
    "snapshot": lambda manager, instance: manager.snapshot(
        instance.id, UploadTarget("snap"), FakeGuest(instance.id)
    ),
    "destroy": lambda manager, instance: manager.destroy(instance.id),
}


@pytest.mark.field("J5")
@pytest.mark.parametrize("kind", ["lost", "down"])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("verb", VERBS)
def test_whatever_answer_is_missing_rows_and_storage_agree_in_the_end(
    remote: HostUnderTest, manager: DiskManager, verb: str, request_: str, kind: str
) -> None:
    data = remote.raw_image()
    instance = remote.instance()
    manager.create(instance)
    with connected(manager, instance.id) as (source,):
        write(source, 0x99, 5 * MiB)
    faults = Faults(str(remote.path / "server"))
    for count in (1, 30):
        faults.set(request_, kind, count)
        with contextlib.suppress(exc.ImageBackendError):
            VERBS[verb](manager, instance)
        faults.set(request_, kind, 0)
        later = remote.manager()
        list(later.recover(dry_run=False))
        agree(remote, later)
        for disk in later.list():
            assert str(disk.state) == "ready", disk
        if list(later.list(instance.id)):
            later.disconnect(instance.id)
            with connected(later, instance.id) as (source,):
                assert isinstance(source, FileSource)
                assert read_disk(source, 0, MiB) == data
    for disk in list(manager.list()):
        manager.destroy(str(disk.instance_id))
    assert volumes(remote) == {}
