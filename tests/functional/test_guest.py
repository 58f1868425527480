# SPDX-License-Identifier: Apache-2.0
"""What real guests see of their disks, through libvirt."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebackend import (
    DiskManager,
    DiskSpec,
    Instance,
    Lifecycle,
    Role,
    UploadTarget,
)
from imagebackend import exceptions as exc
from imagebackend.libvirt import secret
from imagebackend.libvirt.guest import Guest
from imagebackend.model import Severity
from imagebackend.testing import guest_image
from imagebackend.testing.libvirt_guest import TestGuest
from tests.conftest import GiB, HostUnderTest, MiB

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def image() -> str:
    configured = os.environ.get("IMAGEBACKEND_GUEST_IMAGE", ".testbed/guest.qcow2")
    return guest_image.ensure(configured)


@pytest.fixture
def guest_host(host: HostUnderTest, image: str) -> Iterator[HostUnderTest]:
    """A host in a folder that QEMU's own user may enter."""
    state = Path("/var/tmp") / f"imagebackend-test-{uuid.uuid4()}"
    (state / "images").mkdir(parents=True)
    state.chmod(0o711)
    shutil.copy(image, state / "images" / "guest.qcow2")
    host.path = state
    host.set("state_path", str(state))
    yield host
    shutil.rmtree(state)


@pytest.fixture(params=["qcow2", "raw", "rbd"])
def backend(request: pytest.FixtureRequest, guest_host: HostUnderTest) -> Iterator[str]:
    name = str(request.param)
    guest_host.set("default_backend", name)
    if name == "rbd":
        guest_host.enable_rbd(request.getfixturevalue("ceph"))
    with secret.restored(guest_host.conf):
        yield name


@pytest.fixture
def manager(guest_host: HostUnderTest) -> DiskManager:
    return guest_host.manager()


@contextlib.contextmanager
def running(manager: DiskManager, instance: Instance) -> Iterator[TestGuest]:
    manager.connect(instance.id)
    try:
        with TestGuest(
            f"test-{instance.id[:8]}",
            manager.libvirt_xml(instance.id),
            uuid=instance.id,
        ) as guest:
            guest.start()
            guest.wait_ready()
            yield guest
    finally:
        manager.disconnect(instance.id)


def sizes(guest: TestGuest) -> dict[str, int]:
    guest.command("disks")
    return {disk.name: disk.bytes for disk in guest.report().disks}


def larger(instance: Instance, root_gb: int) -> Instance:
    assert instance.flavor is not None
    flavor = dataclasses.replace(instance.flavor, root_gb=root_gb)
    return dataclasses.replace(instance, flavor=flavor)


def nothing_wrong(manager: DiskManager) -> None:
    assert [each for each in manager.audit() if each.severity is not Severity.OK] == []


def test_a_guest_sees_its_disks_and_a_rebuilt_one_is_pristine(
    guest_host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    instance = guest_host.instance("guest", ephemeral_gb=1, swap_mb=64)
    manager.create(instance)
    ids = {disk.name: disk.serial for disk in manager.list(instance.id)}
    with running(manager, instance) as guest:
        report = guest.report()
        assert report.boot == 1
        seen = {disk.serial: disk for disk in report.disks}
        assert seen[ids["root"][:20]].bytes == GiB
        assert seen[ids["ephemeral0"][:20]].fs == "ext4"
        assert seen[ids["swap"][:20]].bytes == 64 * MiB
        guest.poweroff()
    with running(manager, instance) as guest:
        assert guest.report().boot == 2
        guest.poweroff()
    manager.rebuild(instance)
    with running(manager, instance) as guest:
        assert guest.report().boot == 1
        assert {disk.serial for disk in guest.report().disks} == set(seen)
        guest.poweroff()
    manager.destroy(instance.id)
    assert guest_host.objects() == []


def test_a_running_guest_sees_its_disk_grow(
    guest_host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    instance = guest_host.instance("guest")
    manager.create(instance)
    with running(manager, instance) as guest:
        written = guest.command("write vda 100 1 kept")
        assert written == "write"
        before = guest.command("sum vda 100 1")
        manager.resize(larger(instance, 3), Guest.lookup(guest_host.conf, instance.id))
        assert sizes(guest) == {"vda": 3 * GiB}
        assert guest.command("write vda 2900 1 far") == "write"
        assert guest.command("sum vda 100 1") == before
        guest.poweroff()
    (disk,) = manager.list(instance.id)
    assert disk.size == 3 * GiB
    nothing_wrong(manager)


@pytest.mark.parametrize("format_", ["qcow2", "raw"])
def test_a_snapshot_of_a_running_guest_has_what_it_wrote(
    guest_host: HostUnderTest, manager: DiskManager, backend: str, format_: str
) -> None:
    instance = guest_host.instance("guest", ephemeral_gb=1)
    manager.create(instance)
    with running(manager, instance) as guest:
        guest.command("write vda 200 2 before")
        wanted = guest.command("sum vda 200 2").split()[1]
        seen: list[str] = []
        info = manager.snapshot(
            instance.id,
            UploadTarget("snap", format_),
            Guest.lookup(guest_host.conf, instance.id),
            progress=lambda progress: seen.append(progress.what),
        )
        guest.command("write vda 200 2 after")
        assert guest.command("sum vda 200 2").split()[1] != wanted
        guest.poweroff()
    assert info.disk_format == format_ and "snapshot" in seen
    copy = guest_host.path / "copy.raw"
    subprocess.run(
        [
            *("qemu-img", "convert", "-f", format_, "-O", "raw"),
            *(guest_host.images / f"snap.{format_}", copy),
        ],
        check=True,
    )
    with copy.open("rb") as file:
        file.seek(200 * MiB)
        assert hashlib.sha256(file.read(2 * MiB)).hexdigest() == wanted
    second = guest_host.instance("snap")
    manager.create(second)
    with running(manager, second) as guest:
        assert guest.report().boot == 2  # of the counter that went on in the copy
        guest.poweroff()
    assert guest_host.files("tmp") == []
    nothing_wrong(manager)


def test_nothing_is_done_to_the_disks_of_a_running_guest_by_mistake(
    guest_host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    instance = guest_host.instance("guest")
    manager.create(instance)
    with running(manager, instance) as guest:
        for verb in (
            lambda: manager.destroy(instance.id),
            lambda: manager.rebuild(instance),
            lambda: manager.resize(larger(instance, 2)),
            lambda: manager.snapshot(instance.id, UploadTarget("snap")),
            lambda: manager.update(instance, []),
            lambda: manager.disconnect(instance.id),
        ):
            if verb.__code__.co_names[0] == "update":
                manager.taint(instance.id)
            with pytest.raises(exc.Busy, match="stop the guest first"):
                verb()
        assert guest.command("sum vda 0 1").startswith("sum ")
        guest.poweroff()
    manager.destroy(instance.id)
    assert guest_host.objects() == []


@pytest.mark.field("A5")
def test_a_guest_that_writes_an_image_header_gains_nothing(
    guest_host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    instance = guest_host.instance(
        "guest", ephemeral_gb=1, imagebackend__ephemeral_backend="raw"
    )
    manager.create(instance)
    with running(manager, instance) as guest:
        guest.command("header vdb")
        guest.command("header vda")
        manager.snapshot(
            instance.id,
            UploadTarget("snap"),
            Guest.lookup(guest_host.conf, instance.id),
        )
        guest.poweroff()
    manager.snapshot(instance.id, UploadTarget("again", "raw"))
    for name in ("snap.qcow2", "again.raw"):
        data = (guest_host.images / name).read_bytes()
        assert b"root:x:0:0" not in data
    info = subprocess.run(
        ["qemu-img", "info", "-f", "qcow2", guest_host.images / "snap.qcow2"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "backing" not in info
    manager.resize(larger(instance, 2))
    sizes_now = {disk.name: disk.size for disk in manager.list(instance.id)}
    assert sizes_now == {"root": 2 * GiB, "ephemeral0": GiB}
    with pytest.raises(exc.ImageRejected, match="bytes say qcow2"):
        manager.create(guest_host.instance("again"))
    nothing_wrong(manager)


def test_a_persistent_disk_goes_to_the_next_guest_with_its_data(
    guest_host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    first, second = guest_host.instance("guest"), guest_host.instance("guest")
    data = DiskSpec(name="data", size=64 * MiB, lifecycle=Lifecycle.PERSISTENT)
    manager.create(first, [data])
    with running(manager, first) as guest:
        guest.command("write vdb 1 1 mine")
        wanted = guest.command("sum vdb 1 1")
        guest.poweroff()
    manager.destroy(first.id)
    (kept,) = manager.list()
    manager.create(second, [DiskSpec(name="data", disk=kept.id)])
    with running(manager, second) as guest:
        assert guest.command("sum vdb 1 1") == wanted
        guest.poweroff()


def test_disks_on_other_buses_and_a_cd(
    guest_host: HostUnderTest, manager: DiskManager
) -> None:
    folder = guest_host.path / "content"
    folder.mkdir()
    (folder / "hello").write_text("hello")
    drive = guest_host.path / "config.iso"
    subprocess.run(["genisoimage", "-quiet", "-o", drive, folder], check=True)
    instance = guest_host.instance("guest")
    manager.create(
        instance,
        [
            DiskSpec(
                name="wide", size=8 * MiB, bus="ide", lifecycle=Lifecycle.PERSISTENT
            ),
            DiskSpec(role=Role.CONFIG, path=str(drive), cdrom=True, bus="ide"),
        ],
    )
    with running(manager, instance) as guest:
        seen = {disk.name: disk for disk in guest.report().disks}
        assert seen["sr0"].fs == "iso9660" and seen["sr0"].readonly
        assert seen["sda"].bytes == 8 * MiB
        guest.poweroff()


def test_a_shareable_disk_is_one_for_two_running_guests(
    guest_host: HostUnderTest, manager: DiskManager
) -> None:
    first, second = guest_host.instance("guest"), guest_host.instance("guest")
    manager.create(
        first,
        [
            DiskSpec(
                name="shared",
                size=8 * MiB,
                shareable=True,
                backend="raw",
                lifecycle=Lifecycle.PERSISTENT,
            )
        ],
    )
    shared = next(each for each in manager.list(first.id) if each.name == "shared")
    manager.create(second, [DiskSpec(name="shared", disk=shared.id)])
    with running(manager, first) as one, running(manager, second) as two:
        one.command("write vdb 1 1 seen-by-both")
        assert two.command("sum vdb 1 1") == one.command("sum vdb 1 1")
        one.poweroff()
        two.poweroff()
    manager.destroy(first.id)
    manager.destroy(second.id)
    assert manager.delete_disk(shared.id).deleted


def test_a_guest_that_does_not_run_or_is_another_ones_is_refused(
    guest_host: HostUnderTest, manager: DiskManager
) -> None:
    instance, other = guest_host.instance("guest"), guest_host.instance("guest")
    manager.create(instance)
    manager.create(other)
    with pytest.raises(exc.HypervisorError, match=instance.id):
        Guest.lookup(guest_host.conf, instance.id)
    with running(manager, other) as guest:
        wrong = Guest.lookup(guest_host.conf, other.id)
        with pytest.raises(exc.HypervisorError, match="another instance"):
            manager.resize(larger(instance, 2), wrong)
        with pytest.raises(exc.HypervisorError, match="another instance"):
            manager.snapshot(instance.id, UploadTarget("snap"), wrong)
        guest.poweroff()
    assert not (guest_host.images / "snap.qcow2").exists()
    (disk,) = manager.list(instance.id)
    assert (disk.size, str(disk.state)) == (GiB, "ready")
    nothing_wrong(manager)


def test_a_missing_libvirt_is_said_to_be_missing(
    guest_host: HostUnderTest, manager: DiskManager
) -> None:
    guest_host.set("uri", "qemu+unix:///system?socket=/nowhere", "imagebackend_libvirt")
    with pytest.raises(exc.HypervisorError, match="libvirt does not answer"):
        Guest.lookup(guest_host.conf, str(uuid.uuid4()))
    instance = guest_host.instance("guest")
    manager.create(instance)  # needs no libvirt
    manager.destroy(instance.id)


def test_quiescing_that_an_image_requires_is_not_left_out(
    guest_host: HostUnderTest, manager: DiskManager
) -> None:
    guest_host.describe("guest", properties={"os_require_quiesce": "yes"})
    instance = guest_host.instance("guest")
    manager.create(instance)
    with running(manager, instance) as guest:
        with pytest.raises(exc.HypervisorError, match="guest agent"):
            manager.snapshot(
                instance.id,
                UploadTarget("snap"),
                Guest.lookup(guest_host.conf, instance.id),
            )
        guest.poweroff()
    assert not (guest_host.images / "snap.qcow2").exists()
    nothing_wrong(manager)
