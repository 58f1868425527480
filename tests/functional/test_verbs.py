# SPDX-License-Identifier: Apache-2.0
"""What every verb promises, on real qcow2 and raw files and on real Ceph."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from imagebackend import Change, DiskManager, DiskSpec, Lifecycle, Role, UploadTarget
from imagebackend import exceptions as exc
from imagebackend.backends.files import FileBackend
from imagebackend.model import Disk, DiskState, FileSource, Instance, Severity, Source
from imagebackend.qemu_img import image_opts
from imagebackend.testing.harness import virtual_size
from tests.conftest import GiB, HostUnderTest, MiB, read_disk

FILES = ("qcow2", "raw")


@pytest.fixture(params=[*FILES, "rbd"])
def backend(request: pytest.FixtureRequest, host: HostUnderTest) -> str:
    """The host's default backend."""
    name = str(request.param)
    if name == "rbd":
        host.enable_rbd(request.getfixturevalue("ceph"))
    host.set("default_backend", name)
    return name


@pytest.fixture(params=FILES)
def files_backend(request: pytest.FixtureRequest, host: HostUnderTest) -> str:
    """The same, where a test meddles with the files."""
    name = str(request.param)
    host.set("default_backend", name)
    return name


@contextmanager
def connected(manager: DiskManager, instance_id: str) -> Iterator[list[Source]]:
    try:
        yield [each.source for each in manager.connect(instance_id)]
    finally:
        manager.disconnect(instance_id)


def write(source: Source, pattern: int, offset: int = 0, length: int = MiB) -> None:
    """As a guest would."""
    subprocess.run(
        [
            *("qemu-io", "--image-opts", image_opts(source)),
            *("-c", f"write -P {pattern} {offset} {length}"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


@contextmanager
def guest_running(source: Source) -> Iterator[None]:
    """Something that has the disk open as a guest's QEMU has."""
    process = subprocess.Popen(
        ["qemu-io", "--image-opts", image_opts(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin and process.stdout
    process.stdin.write(b"length\n")
    process.stdin.flush()
    process.stdout.readline()
    try:
        yield
    finally:
        process.communicate(b"quit\n")


def by_name(manager: DiskManager, instance_id: str) -> dict[str, Disk]:
    return {disk.name: disk for disk in manager.list(instance_id)}


def nothing_wrong(manager: DiskManager) -> None:
    assert [each for each in manager.audit() if each.severity is not Severity.OK] == []
    assert list(manager.recover(dry_run=True)) == []


def with_root(instance: Instance, root_gb: int) -> Instance:
    assert instance.flavor is not None
    return dataclasses.replace(
        instance, flavor=dataclasses.replace(instance.flavor, root_gb=root_gb)
    )


# --- create -------------------------------------------------------------------


@pytest.mark.field("B9")
def test_create_gives_disks_of_exact_size_with_the_images_bytes(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    data = host.raw_image(size=3 * MiB)
    instance = host.instance(root_gb=3, ephemeral_gb=1, swap_mb=64)
    change = manager.create(instance)
    assert [each.name for each in change.created] == ["root", "ephemeral0", "swap"]
    with connected(manager, instance.id) as (root, ephemeral, swap):
        assert virtual_size(root) == 3 * GiB
        assert virtual_size(ephemeral) == GiB
        assert virtual_size(swap) == 64 * MiB
        assert read_disk(root, 0, 3 * MiB) == data
        assert read_disk(root, 3 * MiB, MiB) == bytes(MiB)
        assert read_disk(ephemeral, 0, 2048)[1080:1082] == b"\x53\xef"  # ext4's magic
        assert read_disk(swap, 0, 4096)[4086:] == b"SWAPSPACE2"
    nothing_wrong(manager)


@pytest.mark.field("A11")
def test_a_qcow2_image_becomes_the_same_bytes(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    data = host.qcow2_image()
    instance = host.instance("qcow2-image")
    manager.create(instance)
    with connected(manager, instance.id) as (root,):
        assert read_disk(root, 0, len(data)) == data


def test_create_again_returns_the_same_disks(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    instance = host.instance()
    first = manager.create(instance)
    before = host.objects()
    again = manager.create(instance)
    assert not again.created
    assert [each.disk_id for each in again.kept] == [
        each.disk_id for each in first.created
    ]
    assert host.objects() == before
    other = with_root(instance, 2)
    with pytest.raises(exc.Conflict, match=instance.id):
        manager.create(other)


@pytest.mark.field("J5")
def test_create_that_fails_half_way_leaves_nothing(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    (host.images / "bad.raw").write_bytes(b"QFI\xfb" + bytes(MiB))
    instance = host.instance(ephemeral_gb=1)
    spec = DiskSpec(name="data", image="bad", size=GiB)
    with pytest.raises(exc.ImageRejected):
        manager.create(instance, [spec])
    assert host.objects() == []
    assert list(manager.list()) == []
    nothing_wrong(manager)
    manager.create(host.instance(id=instance.id))  # the id is free again


def test_a_plan_has_no_effect(host: HostUnderTest, manager: DiskManager) -> None:
    host.raw_image()
    plan = manager.plan(host.instance(ephemeral_gb=1))
    assert [(disk.name, disk.size) for disk in plan.disks] == [
        ("root", GiB),
        ("ephemeral0", GiB),
    ]
    assert host.objects() == []
    assert not (host.path / "cache").exists()
    assert list(manager.list()) == []


def test_a_config_drive_is_a_copy_of_the_callers_file(
    host: HostUnderTest, manager: DiskManager, backend: str, tmp_path: Path
) -> None:
    host.raw_image()
    drive = tmp_path / "config.iso"
    drive.write_bytes(os.urandom(64 * 1024))
    instance = host.instance()
    spec = DiskSpec(role=Role.CONFIG, path=str(drive), cdrom=True)
    manager.create(instance, [spec])
    with connected(manager, instance.id) as (_root, config):
        assert read_disk(config, 0, 64 * 1024) == drive.read_bytes()
        xml = manager.libvirt_xml(instance.id)[1]
    assert 'device="cdrom"' in xml and "<readonly" in xml


def test_an_iso_image_becomes_a_cd(
    host: HostUnderTest, manager: DiskManager, backend: str, tmp_path: Path
) -> None:
    folder = tmp_path / "content"
    folder.mkdir()
    (folder / "file").write_text("hello")
    subprocess.run(
        ["genisoimage", "-quiet", "-o", host.images / "cd.iso", folder], check=True
    )
    instance = host.instance("cd")
    manager.create(instance)
    (disk,) = manager.list(instance.id)
    assert disk.cdrom
    with connected(manager, instance.id) as (source,):
        wanted = (host.images / "cd.iso").read_bytes()
        assert read_disk(source, 0, len(wanted)) == wanted
        assert 'bus="sata"' in manager.libvirt_xml(instance.id)[0]


def test_two_creates_of_one_instance_at_once_make_it_once(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    instance = host.instance()
    results: list[object] = []

    def work() -> None:
        try:
            results.append(manager.create(instance))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(each, exc.Busy | Change) for each in results), results
    assert len(host.objects()) == 1
    nothing_wrong(manager)


# --- rebuild --------------------------------------------------------------------


def test_rebuild_gives_pristine_disks_under_the_same_ids(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    data = host.raw_image()
    instance = host.instance(ephemeral_gb=1)
    kept = DiskSpec(name="data", size=64 * MiB, lifecycle=Lifecycle.PERSISTENT)
    manager.create(instance, [kept])
    with connected(manager, instance.id) as sources:
        for source in sources:
            write(source, 0x5A)
    before = by_name(manager, instance.id)
    change = manager.rebuild(instance)
    assert {each.name for each in change.recreated} == {"root", "ephemeral0"}
    assert [each.name for each in change.kept] == ["data"]
    for each in change.recreated:
        assert each.old and each.new and each.old != each.new
    after = by_name(manager, instance.id)
    assert {name: disk.serial for name, disk in before.items()} == {
        name: disk.serial for name, disk in after.items()
    }
    with connected(manager, instance.id) as (root, ephemeral, persistent):
        assert read_disk(root, 0, MiB) == data
        assert read_disk(ephemeral, 0, MiB) != b"\x5a" * MiB
        assert read_disk(persistent, 0, MiB) == b"\x5a" * MiB
    assert len(host.objects()) == 3
    nothing_wrong(manager)


def test_rebuild_from_another_image(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    other = host.raw_image("other")
    instance = host.instance()
    manager.create(instance)
    manager.rebuild(dataclasses.replace(instance, image="other"))
    with connected(manager, instance.id) as (root,):
        assert read_disk(root, 0, MiB) == other
    (disk,) = manager.list(instance.id)
    assert disk.image == "other"


def test_rebuild_that_fails_keeps_the_old_disk(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    (host.images / "bad.raw").write_bytes(b"QFI\xfb" + bytes(MiB))
    instance = host.instance()
    manager.create(instance)
    with connected(manager, instance.id) as (root,):
        write(root, 0x77)
    before = host.objects()
    with pytest.raises(exc.ImageRejected):
        manager.rebuild(dataclasses.replace(instance, image="bad"))
    assert host.objects() == before
    with connected(manager, instance.id) as (root,):
        assert read_disk(root, 0, MiB) == b"\x77" * MiB
    nothing_wrong(manager)


# --- update and taint -------------------------------------------------------------


def test_update_makes_what_is_new_and_deletes_what_falls_out(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    instance = host.instance(ephemeral_gb=1)
    manager.create(instance, [DiskSpec(name="old", size=MiB)])
    change = manager.update(instance, [DiskSpec(name="new", size=2 * MiB)])
    assert [each.name for each in change.created] == ["new"]
    assert [each.name for each in change.deleted] == ["old"]
    assert [each.name for each in change.kept] == ["root"]
    assert set(by_name(manager, instance.id)) == {"root", "new"}
    assert len(host.objects()) == 2
    nothing_wrong(manager)


def test_update_grows_in_place_and_keeps_the_data(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    instance = host.instance(ephemeral_gb=1)
    manager.create(instance, [DiskSpec(name="data", size=MiB)])
    with connected(manager, instance.id) as (_, data):
        write(data, 0x33)
    change = manager.update(instance, [DiskSpec(name="data", size=4 * MiB)])
    assert not change.recreated and not change.created
    with connected(manager, instance.id) as (_, data):
        assert virtual_size(data) == 4 * MiB
        assert read_disk(data, 0, MiB) == b"\x33" * MiB
    nothing_wrong(manager)


def test_after_taint_the_next_update_recreates_all_ephemeral_disks(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    instance = host.instance(ephemeral_gb=1)
    specs = [
        DiskSpec(name="scratch", size=MiB),
        DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT),
    ]
    manager.create(instance, specs)
    manager.taint(instance.id)
    assert all(
        disk.tainted for disk in manager.list(instance.id) if disk.name != "data"
    )
    change = manager.update(instance, specs)
    assert {each.name for each in change.recreated} == {"root", "scratch"}
    assert [each.name for each in change.kept] == ["data"]
    assert not manager.update(instance, specs).recreated


def test_update_may_grow_detach_create_and_attach_in_one_call(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    other, instance = host.instance(), host.instance()

    def data(name: str, size: int = MiB) -> DiskSpec:
        return DiskSpec(name=name, size=size, lifecycle=Lifecycle.PERSISTENT)

    manager.create(other, [data("free")])
    free = by_name(manager, other.id)["free"]
    manager.destroy(other.id)
    manager.create(instance, [data("grows"), data("leaves")])
    change = manager.update(
        instance,
        [data("grows", 2 * MiB), data("new"), DiskSpec(name="free", disk=free.id)],
    )
    assert [each.name for each in change.created] == ["new"]
    assert [each.name for each in change.detached] == ["leaves"]
    disks = by_name(manager, instance.id)
    assert set(disks) == {"root", "grows", "new", "free"}
    assert disks["grows"].size == 2 * MiB
    assert len({disk.device for disk in disks.values()}) == 4
    nothing_wrong(manager)


def test_a_plan_refuses_what_create_would(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    instance = host.instance()
    with pytest.raises(exc.DiskNotFound):
        manager.plan(instance, [DiskSpec(name="data", disk=str(uuid.uuid4()))])
    manager.create(instance)
    manager.plan(instance)
    with pytest.raises(exc.Conflict, match="asked for differently"):
        manager.plan(with_root(instance, 2))


def test_a_swap_disk_is_formatted_whoever_asks_for_it(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    instance = dataclasses.replace(host.instance(None), flavor=None)
    manager.create(instance, [DiskSpec(role=Role.SWAP, size=MiB)])
    with connected(manager, instance.id) as (swap,):
        assert read_disk(swap, 0, 4096)[4086:] == b"SWAPSPACE2"


def test_a_rebuild_says_which_file_of_the_callers_is_gone(
    host: HostUnderTest, manager: DiskManager, tmp_path: Path
) -> None:
    host.raw_image()
    drive = tmp_path / "drive"
    drive.write_bytes(b"config")
    instance = host.instance()
    manager.create(instance, [DiskSpec(role=Role.CONFIG, path=str(drive))])
    drive.unlink()
    with pytest.raises(exc.InvalidValue, match=str(drive)):
        manager.rebuild(instance)
    nothing_wrong(manager)


# --- persistent and shared disks -----------------------------------------------------


def test_a_persistent_disk_outlives_its_instance_and_is_attached_again(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    first = host.instance()
    data = DiskSpec(name="data", size=4 * MiB, lifecycle=Lifecycle.PERSISTENT)
    manager.create(first, [data])
    disk = by_name(manager, first.id)["data"]
    with connected(manager, first.id) as (_, source):
        write(source, 0x42)
    change = manager.destroy(first.id)
    assert [each.name for each in change.detached] == ["data"]
    (kept,) = manager.list()
    assert (kept.id, str(kept.state), kept.owners) == (disk.id, "kept", ())
    second = host.instance()
    manager.create(second, [DiskSpec(name="old-data", disk=disk.id)])
    with connected(manager, second.id) as (_, source):
        assert read_disk(source, 0, MiB) == b"\x42" * MiB
    with pytest.raises(exc.DiskInUse, match=second.id):
        manager.delete_disk(disk.id)
    manager.destroy(second.id)
    assert manager.delete_disk(disk.id).deleted[0].disk_id == disk.id
    assert host.objects() == []
    nothing_wrong(manager)


def test_a_disk_has_one_owner_unless_it_is_shareable(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    first, second = host.instance(), host.instance()
    manager.create(
        first, [DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)]
    )
    disk = by_name(manager, first.id)["data"]
    with pytest.raises(exc.DiskInUse, match=first.id):
        manager.create(second, [DiskSpec(name="data", disk=disk.id)])
    assert list(manager.list(second.id)) == []
    nothing_wrong(manager)


def test_a_disk_of_another_project_is_not_found(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    first = host.instance()
    manager.create(
        first, [DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)]
    )
    disk = by_name(manager, first.id)["data"]
    manager.destroy(first.id)
    for spec in (
        DiskSpec(name="data", disk=disk.id),
        DiskSpec(name="data", base=disk.id, lifecycle=Lifecycle.PERSISTENT),
    ):
        with pytest.raises(exc.DiskNotFound, match="other"):
            manager.create(host.instance(project_id="other"), [spec])


def test_a_shareable_raw_disk_serves_two_instances_and_goes_with_the_last(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    first, second = host.instance(), host.instance()
    shared = DiskSpec(name="shared", size=MiB, shareable=True, backend="raw")
    manager.create(first, [shared])
    disk = by_name(manager, first.id)["shared"]
    manager.create(second, [DiskSpec(name="shared", disk=disk.id)])
    assert set(by_name(manager, first.id)["shared"].owners) == {first.id, second.id}
    with connected(manager, first.id), connected(manager, second.id):
        assert "<shareable" in manager.libvirt_xml(first.id)[1]
        assert "<shareable" in manager.libvirt_xml(second.id)[1]
    assert [each.name for each in manager.destroy(first.id).detached] == ["shared"]
    assert [each.name for each in manager.destroy(second.id).deleted] == [
        "root",
        "shared",
    ]
    assert host.objects() == []


def test_a_shareable_qcow2_disk_is_refused_in_the_plan(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    shared = DiskSpec(name="shared", size=MiB, shareable=True, backend="qcow2")
    with pytest.raises(exc.NotSupported, match="qcow2"):
        manager.plan(host.instance(), [shared])


def test_a_base_disk_is_copied(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    first = host.instance()
    manager.create(
        first, [DiskSpec(name="data", size=2 * MiB, lifecycle=Lifecycle.PERSISTENT)]
    )
    disk = by_name(manager, first.id)["data"]
    with connected(manager, first.id) as (_, source):
        write(source, 0x21)
    second = host.instance(ephemeral_gb=1)
    manager.create(second, [DiskSpec(name="copy", base=disk.id)])
    with connected(manager, second.id) as (_, source):
        assert read_disk(source, 0, 2 * MiB) == b"\x21" * MiB + bytes(MiB)


# --- destroy -------------------------------------------------------------------------


def test_destroy_of_what_is_not_recorded_is_an_empty_change(
    manager: DiskManager,
) -> None:
    change = manager.destroy(str(uuid.uuid4()))
    assert not (change.deleted or change.detached or change.kept)


def test_destroy_waits_for_no_guest_but_says_that_one_runs(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    instance = host.instance()
    manager.create(instance)
    with connected(manager, instance.id) as (root,), guest_running(root):
        for verb in (
            lambda: manager.destroy(instance.id),
            lambda: manager.rebuild(instance),
            lambda: manager.resize(with_root(instance, 2)),
            lambda: manager.disconnect(instance.id),
            lambda: manager.snapshot(instance.id, UploadTarget("snap")),
        ):
            with pytest.raises(exc.Busy, match="in use"):
                verb()
        assert by_name(manager, instance.id)["root"].state.settled
    manager.destroy(instance.id)
    assert host.objects() == []
    nothing_wrong(manager)


@pytest.mark.field("J6")
def test_destroy_works_from_the_rows_when_nothing_was_ever_connected(
    host: HostUnderTest, backend: str
) -> None:
    host.raw_image()
    instance = host.instance()
    host.manager().create(instance)
    assert host.manager().destroy(instance.id).deleted
    assert host.objects() == []


def test_a_failed_persistent_disk_stays_failed_when_its_instance_goes(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    instance = host.instance()
    spec = DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)
    manager.create(instance, [spec])
    disk = by_name(manager, instance.id)["data"]
    with manager._ctx.store.writing() as tx:
        row = tx.disk(disk.id)
        assert row is not None
        tx.update_disk(row, state=DiskState.FAILED, reason="its file was garbled")
    manager.destroy(instance.id)
    found = manager.disk(disk.id)
    assert (str(found.state), found.reason) == ("failed", "its file was garbled")
    with pytest.raises(exc.Conflict, match="garbled"):
        manager.create(host.instance(), [DiskSpec(name="data", disk=disk.id)])
    manager.delete_disk(disk.id)
    assert host.objects() == []


# --- resize --------------------------------------------------------------------------


def test_resize_grows_and_keeps_the_data(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    data = host.raw_image()
    instance = host.instance(ephemeral_gb=1)
    manager.create(instance)
    manager.resize(with_root(instance, 5))
    sizes = {disk.name: disk.size for disk in manager.list(instance.id)}
    assert sizes == {"root": 5 * GiB, "ephemeral0": GiB}
    with connected(manager, instance.id) as (root, _):
        assert virtual_size(root) == 5 * GiB
        assert read_disk(root, 0, MiB) == data
    nothing_wrong(manager)


@pytest.mark.field("B7")
def test_resize_never_shrinks_any_disk(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    instance = host.instance(root_gb=2, ephemeral_gb=3)
    halves = [DiskSpec(name=f"e{n}", size=GiB) for n in (1, 2)]
    manager.create(instance, halves)
    assert instance.flavor is not None
    smaller = dataclasses.replace(instance.flavor, root_gb=1)
    with pytest.raises(exc.SizeRefused, match="root"):
        manager.resize(dataclasses.replace(instance, flavor=smaller))
    smaller = dataclasses.replace(instance.flavor, ephemeral_gb=1)
    with pytest.raises(exc.SizeRefused):
        manager.resize(dataclasses.replace(instance, flavor=smaller))
    sizes = {disk.name: disk.size for disk in manager.list(instance.id)}
    assert sizes["root"] == 2 * GiB and sizes["e1"] == sizes["e2"] == GiB
    nothing_wrong(manager)


# --- snapshot ------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["qcow2", "raw"])
def test_a_snapshot_has_the_disks_bytes(
    host: HostUnderTest, manager: DiskManager, backend: str, format_: str
) -> None:
    data = host.raw_image()
    instance = host.instance()
    manager.create(instance)
    with connected(manager, instance.id) as (root,):
        write(root, 0x11, 5 * MiB)
    info = manager.snapshot(instance.id, UploadTarget("snap", format_))
    assert info.digest and info.digest.startswith("sha512:")
    image = FileSource(str(host.images / f"snap.{format_}"), format_)
    assert virtual_size(image) == GiB
    assert read_disk(image, 0, MiB) == data
    assert read_disk(image, 5 * MiB, MiB) == b"\x11" * MiB
    second = host.instance("snap")
    manager.create(second)
    with connected(manager, second.id) as (root,):
        assert read_disk(root, 5 * MiB, MiB) == b"\x11" * MiB
    nothing_wrong(manager)


@pytest.mark.field("A5")
@pytest.mark.parametrize("format_", ["qcow2", "raw"])
def test_a_header_that_the_guest_wrote_is_only_bytes(
    host: HostUnderTest,
    manager: DiskManager,
    backend: str,
    format_: str,
    tmp_path: Path,
) -> None:
    host.raw_image()
    secret = tmp_path / "secret"
    secret.write_bytes(b"top secret" * 100000)
    evil = tmp_path / "evil.qcow2"
    subprocess.run(
        [
            *("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw"),
            *("-b", secret, evil, "20G"),
        ],
        check=True,
    )
    header = evil.read_bytes()[:65536].ljust(65536, b"\0")
    instance = host.instance()
    manager.create(instance)
    with connected(manager, instance.id) as (root,):
        subprocess.run(
            [
                *("qemu-io", "--image-opts", image_opts(root), "-c"),
                f"write -s {evil} 0 65536",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        assert read_disk(root, 0, 65536) == header
    manager.resize(with_root(instance, 2))
    manager.snapshot(instance.id, UploadTarget("snap", format_))
    image = FileSource(str(host.images / f"snap.{format_}"), format_)
    assert virtual_size(image) == 2 * GiB
    assert read_disk(image, 0, 65536) == header
    assert b"top secret" not in (host.images / f"snap.{format_}").read_bytes()
    manager.rebuild(with_root(instance, 2))
    with connected(manager, instance.id) as (root,):
        assert read_disk(root, 0, 4) != b"QFI\xfb"
        assert virtual_size(root) == 2 * GiB
    nothing_wrong(manager)


def test_a_snapshot_into_an_image_that_exists_is_refused_before_any_work(
    host: HostUnderTest, manager: DiskManager
) -> None:
    data = host.raw_image()
    instance = host.instance()
    manager.create(instance)
    with pytest.raises(exc.Conflict, match="raw-image"):
        manager.snapshot(instance.id, UploadTarget("raw-image"))
    assert (host.images / "raw-image.raw").read_bytes() == data


# --- connect -------------------------------------------------------------------------


def test_xml_is_of_connected_disks_only(
    host: HostUnderTest, manager: DiskManager, backend: str
) -> None:
    host.raw_image()
    instance = host.instance(quota__disk_total_iops_sec="500")
    manager.create(instance)
    assert list(manager.libvirt_xml(instance.id)) == []
    with connected(manager, instance.id):
        (xml,) = manager.libvirt_xml(instance.id)
        assert "<total_iops_sec>500</total_iops_sec>" in xml
        (disk,) = manager.list(instance.id)
        assert disk.connected and f"<serial>{disk.id}</serial>" in xml
    assert list(manager.libvirt_xml(instance.id)) == []


def test_connect_of_what_is_not_recorded_names_the_instance(
    manager: DiskManager,
) -> None:
    instance_id = str(uuid.uuid4())
    for verb in (manager.connect, manager.disconnect, manager.libvirt_xml):
        with pytest.raises(exc.InstanceNotFound, match=instance_id):
            verb(instance_id)


def test_another_host_cannot_connect_a_disk_that_one_has(
    host: HostUnderTest, make_host: Callable[[str], HostUnderTest]
) -> None:
    host.raw_image()
    other = make_host("other")
    url = f"sqlite:///{host.path}/shared.sqlite"
    for each in (host, other):
        each.set("connection", url, "imagebackend_store")
    one, two = host.manager(), other.manager()
    instance = host.instance()
    one.create(instance)
    one.connect(instance.id)
    with pytest.raises(exc.HostConflict, match=one.host_id):
        two.connect(instance.id)
    with pytest.raises(exc.HostConflict, match=one.host_id):
        two.destroy(instance.id)


# --- what was recorded rules --------------------------------------------------------


@pytest.mark.field("A6")
def test_what_was_recorded_rules_when_the_defaults_change(
    host: HostUnderTest, manager: DiskManager
) -> None:
    data = host.raw_image()
    host.set("default_backend", "qcow2")
    instance = host.instance()
    manager.create(instance)
    host.set("default_backend", "raw")
    host.set("cache_format", "as-is", "imagebackend_images")
    later = host.manager()
    later.resize(with_root(instance, 2))
    later.rebuild(with_root(instance, 2))
    (disk,) = later.list(instance.id)
    assert (disk.backend, disk.format, disk.size) == ("qcow2", "qcow2", 2 * GiB)
    with connected(later, instance.id) as (root,):
        assert root.format == "qcow2" and read_disk(root, 0, MiB) == data
    assert not later.update(with_root(instance, 2), []).recreated
    nothing_wrong(later)


def test_a_backend_that_is_not_enabled_any_more_fails_only_its_disks(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    one = host.instance(imagebackend__backend="raw")
    two = host.instance()
    manager.create(one)
    manager.create(two)
    host.set("enabled_backends", ["qcow2"])
    later = host.manager()
    assert len(list(later.list())) == 2
    with pytest.raises(exc.ConfigError, match="raw"):
        later.connect(one.id)
    later.connect(two.id)
    assert later.capacity()


def test_a_folder_that_is_not_mounted_is_unknown_not_empty(
    host: HostUnderTest, manager: DiskManager, files_backend: str
) -> None:
    host.raw_image()
    instance = host.instance()
    manager.create(instance)
    (host.path / "instances").rename(host.path / "away")
    with pytest.raises(exc.StorageUnavailable, match="mounted"):
        manager.destroy(instance.id)
    assert [disk.name for disk in manager.list(instance.id)] == ["root"]
    (host.path / "instances").mkdir()
    with pytest.raises(exc.StorageUnavailable):
        manager.connect(instance.id)
    (host.path / "instances").rmdir()
    (host.path / "away").rename(host.path / "instances")
    list(manager.recover(dry_run=False))
    manager.destroy(instance.id)
    assert host.objects() == []


@pytest.mark.parametrize("trouble", ["not enabled", "not mounted"])
def test_a_backend_that_cannot_be_asked_is_refused_before_anything_is_touched(
    host: HostUnderTest, manager: DiskManager, trouble: str
) -> None:
    host.raw_image()
    raw, shared, kept = (
        DiskSpec(name="raw", size=MiB, backend="raw", lifecycle=Lifecycle.PERSISTENT),
        DiskSpec(name="shared", size=MiB, backend="raw", shareable=True),
        DiskSpec(name="kept", size=MiB, backend="raw", lifecycle=Lifecycle.PERSISTENT),
    )
    instance = host.instance()
    manager.create(instance, [raw, shared, kept])
    change = manager.update(instance, [raw, shared])
    (left,) = change.detached
    manager.connect(instance.id)
    fresh = host.instance(imagebackend__backend="raw")
    manager.create(fresh)
    before = {disk.id: (disk.state, disk.connected) for disk in manager.list()}
    files = host.objects()
    away = host.path / "away"
    if trouble == "not enabled":
        host.set("enabled_backends", ["qcow2"])
    else:
        (host.path / "instances").rename(away)
    later = host.manager()
    larger = dataclasses.replace(raw, size=2 * MiB)
    for verb in (
        lambda: later.connect(instance.id),
        lambda: later.connect(fresh.id),
        lambda: later.disconnect(instance.id),
        lambda: later.destroy(instance.id),
        lambda: later.destroy(fresh.id),
        lambda: later.rebuild(fresh),
        lambda: later.resize(with_root(fresh, 2)),
        lambda: later.resize(with_root(fresh, 2), NoGuest()),
        lambda: later.snapshot(fresh.id, UploadTarget("snapshot")),
        lambda: later.update(instance, [larger, shared]),
        lambda: later.update(instance, [raw]),
        lambda: later.delete_disk(left.disk_id),
    ):
        with pytest.raises(
            (exc.ConfigError, exc.PlacementRefused, exc.StorageUnavailable)
        ):
            verb()
        assert list(later.recover()) == []
    after = {disk.id: (disk.state, disk.connected) for disk in later.list()}
    assert after == before
    if trouble == "not enabled":
        host.set("enabled_backends", ["qcow2", "raw"])
    else:
        away.rename(host.path / "instances")
    assert host.objects() == files
    again = host.manager()
    nothing_wrong(again)
    again.destroy(instance.id)


def spoil(path: Path, how: str) -> None:
    if how in ("link", "folder", "fifo"):
        path.unlink()
    match how:
        case "garbage":
            path.write_bytes(os.urandom(100_000))
        case "cut":
            os.truncate(path, 100)
        case "end":
            os.truncate(path, path.stat().st_size - 64 * 1024)
        case "link":
            path.symlink_to("/etc/passwd")
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)


@pytest.mark.parametrize("how", ["garbage", "cut", "end", "link", "folder", "fifo"])
def test_a_damaged_disk_is_noticed_and_used_by_nobody(
    host: HostUnderTest, manager: DiskManager, files_backend: str, how: str
) -> None:
    host.raw_image()
    instance = host.instance()
    data = DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)
    manager.create(instance, [data])
    path = (
        host.path / "instances" / by_name(manager, instance.id)["root"].handle["path"]
    )
    spoil(path, how)
    (finding,) = [each for each in manager.audit() if each.severity is Severity.ERROR]
    assert str(path) in finding.what
    for verb in (
        lambda: manager.connect(instance.id),
        lambda: manager.resize(with_root(instance, 2)),
        lambda: manager.resize(with_root(instance, 2), NoGuest()),
        lambda: manager.update(with_root(instance, 2), [data]),
        lambda: manager.snapshot(instance.id, UploadTarget("snapshot")),
    ):
        with pytest.raises((exc.IntegrityError, exc.ObjectExists), match=str(path)):
            verb()
        assert {disk.state for disk in manager.list()} == {DiskState.READY}
        assert list(manager.recover()) == []


@pytest.mark.parametrize("how", ["garbage", "cut", "link", "fifo"])
@pytest.mark.parametrize("verb", ["destroy", "delete_disk", "rebuild", "update"])
def test_a_damaged_disk_can_be_deleted_and_made_anew(
    host: HostUnderTest,
    manager: DiskManager,
    files_backend: str,
    how: str,
    verb: str,
) -> None:
    host.raw_image()
    instance = host.instance()
    kept = verb == "delete_disk"
    data = DiskSpec(
        name="data",
        size=MiB,
        lifecycle=Lifecycle.PERSISTENT if kept else Lifecycle.EPHEMERAL,
        shareable=not kept and files_backend == "raw",
    )
    root = host.instance(ephemeral_gb=1, id=instance.id)
    manager.create(root, [data])
    disks = by_name(manager, instance.id)
    root_path, path = (
        host.path / "instances" / disks[name].handle["path"]
        for name in ("root", "data")
    )
    for each in (root_path, path):
        spoil(each, how)
    match verb:
        case "destroy":
            manager.destroy(instance.id)
        case "delete_disk":
            manager.destroy(instance.id)
            manager.delete_disk(disks["data"].id)
        case "rebuild":
            manager.rebuild(root)
        case "update":
            manager.taint(instance.id)
            manager.update(root, [])
    assert not os.path.lexists(root_path)
    if verb != "rebuild":
        assert not os.path.lexists(path)
        nothing_wrong(manager)
    assert Path("/etc/passwd").stat().st_size > 0


def test_a_folder_in_a_disks_place_is_left_to_a_person(
    host: HostUnderTest, manager: DiskManager, files_backend: str
) -> None:
    host.raw_image()
    instance = host.instance()
    manager.create(instance)
    path = host.path / "instances" / host.objects()[0]
    spoil(path, "folder")
    for verb in (manager.destroy, lambda _: manager.rebuild(instance)):
        with pytest.raises(exc.ObjectExists, match="move it away") as caught:
            verb(instance.id)
        assert str(path) in caught.value.message
        assert list(manager.recover()) == []
    path.rmdir()
    manager.destroy(instance.id)
    nothing_wrong(manager)


class NoGuest:
    """A running guest that nothing may be asked of."""

    uuid = "none"

    def refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError

    block_resize = backup = frozen = refuse


def test_recover_says_why_an_operation_cannot_be_settled(
    host: HostUnderTest, manager: DiskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.raw_image()
    instance = host.instance()
    manager.create(instance)
    with monkeypatch.context() as patch:
        for name in ("connect", "disconnect"):
            patch.setattr(FileBackend, name, storage_is_down)
        with pytest.raises(exc.StorageUnavailable):
            manager.connect(instance.id)
    host.set("enabled_backends", ["raw"])
    (finding,) = host.manager().recover()
    assert "not enabled" in finding.what and finding.action == "would be left as it is"
    host.set("enabled_backends", ["qcow2"])
    (finding,) = host.manager().recover()
    assert finding.action == "would be settled"


def storage_is_down(*_args: object, **_kwargs: object) -> None:
    raise exc.StorageUnavailable("the storage does not answer")


def test_nothing_is_made_in_a_folder_that_only_looks_new(
    host: HostUnderTest, manager: DiskManager, files_backend: str
) -> None:
    """An unmounted file system leaves an empty folder, or none."""
    host.raw_image()
    first = host.instance()
    data = DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)
    manager.create(first)
    instances = host.path / "instances"
    instances.rename(host.path / "away")
    second = host.instance(imagebackend__backend=files_backend)
    # Two backends have this folder, and only one of them has a disk in it.
    other = host.instance(
        imagebackend__backend=next(each for each in FILES if each != files_backend)
    )
    for _ in range(2):
        for verb in (
            lambda: manager.create(second),
            lambda: manager.create(other),
            lambda: manager.plan(second),
            lambda: manager.update(first, [data]),
            lambda: manager.rebuild(first),
        ):
            with pytest.raises(exc.StorageUnavailable, match=f"{instances} is not"):
                verb()
        assert host.objects() == [] and not (instances / ".folder-id").exists()
        for findings in (manager.audit(), manager.check()):
            errors = [each for each in findings if each.severity is Severity.ERROR]
            assert [each.subject for each in errors] == [f"backend {files_backend}"]
            assert str(instances) in errors[0].what
        (status,) = [each for each in manager.backends() if each.name == files_backend]
        assert any(each.severity is Severity.ERROR for each in status.findings)
        instances.mkdir(exist_ok=True)
    instances.rmdir()
    (host.path / "away").rename(instances)
    manager.create(second)
    assert {disk.name for disk in manager.list()} == {"root"}
    nothing_wrong(manager)


def test_a_backend_whose_driver_was_changed_refuses_its_disks(
    host: HostUnderTest, manager: DiskManager, files_backend: str
) -> None:
    """Both have the folder: nothing but the recorded format tells them apart."""
    host.raw_image()
    instance = host.instance()
    manager.create(instance)
    path = host.path / "instances" / host.objects()[0]
    before = path.read_bytes()[:MiB], path.stat()
    other = next(each for each in FILES if each != files_backend)
    with host.config_file.open("a") as file:
        file.write(f"[{files_backend}]\ndriver = {other}\n")
    host.conf.reload_config_files()
    changed = host.manager()
    for verb in (
        lambda: changed.connect(instance.id),
        lambda: changed.resize(with_root(instance, 2)),
        lambda: changed.rebuild(instance),
        lambda: changed.snapshot(instance.id, UploadTarget("snapshot")),
        lambda: changed.destroy(instance.id),
    ):
        with pytest.raises(exc.ConfigError, match=f"driver '{other}'"):
            verb()
        assert (path.read_bytes()[:MiB], path.stat()) == before
    for findings in (changed.audit(), changed.check()):
        assert any(
            each.severity is Severity.ERROR
            and f"backend {files_backend}" == each.subject
            for each in findings
        )
    changed.create(host.instance())
    with host.config_file.open("a") as file:
        file.write(f"driver = {files_backend}\n")
    host.conf.reload_config_files()
    again = host.manager()
    again.destroy(instance.id)
    assert not path.exists()


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_store_that_was_lost_is_noticed(
    host: HostUnderTest, manager: DiskManager, files_backend: str, how: str
) -> None:
    host.raw_image()
    instance = host.instance()
    manager.create(instance)
    nothing_wrong(manager)
    deployment = by_name(manager, instance.id)["root"].handle["path"].rpartition(".")[2]
    manager.close()
    for path in (host.path / "store").iterdir():
        path.unlink()
    if how == "empty":
        (host.path / "store" / "imagebackend.sqlite").touch()
    later = host.manager()
    for findings in (later.check(), later.audit(), later.check()):
        (told,) = [each for each in findings if "store has no disk" in each.what]
        assert told.severity is Severity.WARNING and deployment in told.what
    later.create(instance)
    assert not [each for each in later.audit() if each.severity is not Severity.OK]


def test_another_folder_may_be_new(host: HostUnderTest, manager: DiskManager) -> None:
    host.raw_image()
    manager.create(host.instance())
    (host.path / "instances").rename(host.path / "away")
    with host.config_file.open("a") as file:
        file.write(f"[fast]\ndriver = raw\ninstances_path = {host.path}/fast\n")
    host.conf.reload_config_files()
    host.set("enabled_backends", ["fast", "qcow2", "raw"])
    later = host.manager()
    later.create(host.instance(imagebackend__backend="fast"))
    assert len(host.files("fast")) == 1


def test_a_backend_with_disks_that_is_not_enabled_is_an_error_of_the_check(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    manager.create(host.instance(imagebackend__backend="raw"))
    host.set("enabled_backends", ["qcow2"])
    later = host.manager()
    for findings in (later.audit(), later.check()):
        (error,) = [each for each in findings if each.severity is Severity.ERROR]
        assert error.subject == "backend raw" and "not enabled" in error.what


# --- audit ---------------------------------------------------------------------------


@pytest.mark.field("J2", "J4")
def test_audit_reports_both_ways_and_touches_nothing(
    host: HostUnderTest, manager: DiskManager, files_backend: str
) -> None:
    host.raw_image()
    gone, grown, fine = host.instance(), host.instance(), host.instance()
    for each in (gone, grown, fine):
        manager.create(each)
    root = host.path / "instances"
    paths = {name: root / name for name in host.objects()}
    lost = next(path for name, path in paths.items() if name.startswith(gone.id))
    lost.unlink()
    bigger = next(path for name, path in paths.items() if name.startswith(grown.id))
    subprocess.run(
        ["qemu-img", "resize", "-q", "-f", files_backend, bigger, "3G"], check=True
    )
    marker = by_name(manager, fine.id)["root"].handle["path"].rpartition(".")[2]
    orphan = root / fine.id / f"root.{uuid.uuid4()}.{marker}"
    orphan.write_bytes(b"x")
    foreign = root / fine.id / f"root.{uuid.uuid4()}.0123456789ab"
    foreign.write_bytes(b"y")
    (root / "somebody.txt").write_text("not ours")
    before = host.objects()
    found = list(manager.audit())
    bad = {
        (each.subject, each.what) for each in found if each.severity is Severity.ERROR
    }
    assert len(bad) == 3
    assert any("not in backend" in what for _, what in bad)
    assert any(str(3 * GiB) in what for _, what in bad)
    assert any(orphan.name in subject for subject, _ in bad)
    harmless = [each.subject for each in found if each.severity is Severity.OK]
    assert any(foreign.name in subject for subject in harmless)
    assert any("somebody.txt" in subject for subject in harmless)
    list(manager.recover(dry_run=False))
    assert host.objects() == before


def test_export_rows_is_json_with_everything_of_the_instance(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    instance = host.instance(ephemeral_gb=1)
    manager.create(instance)
    rows = json.loads(json.dumps(manager.export_rows(instance.id)))
    assert rows["instance"]["id"] == instance.id
    assert [disk["name"] for disk in rows["disks"]] == ["root", "ephemeral0"]
    assert len(rows["generations"]) == 2


# --- full and read-only file systems ------------------------------------------------


@pytest.fixture
def small_folder(host: HostUnderTest) -> Iterator[Path]:
    """A file system of 24 MiB for the disks."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    path = host.path / "instances"
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", path], check=True
    )
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_file_system_half_way_leaves_what_was_before(
    host: HostUnderTest, manager: DiskManager, small_folder: Path
) -> None:
    host.raw_image(size=16 * MiB)
    host.set("default_backend", "raw")
    first = host.instance()
    manager.create(first)
    before = host.objects()
    second = host.instance()
    for _ in range(2):
        with pytest.raises(exc.NoSpace, match=r"full|No space"):
            manager.create(second)
        with pytest.raises(exc.NoSpace, match=r"full|No space"):
            manager.rebuild(first)
    assert host.objects() == before
    nothing_wrong(manager)


def test_a_read_only_file_system_is_said_to_be_so(
    host: HostUnderTest, manager: DiskManager, small_folder: Path
) -> None:
    host.raw_image()
    host.set("default_backend", "raw")
    instance = host.instance()
    manager.create(instance)
    subprocess.run(["mount", "-o", "remount,ro", small_folder], check=True)
    with pytest.raises(exc.NoSpace, match="read-only"):
        manager.create(host.instance())
    with pytest.raises(exc.NoSpace, match="read-only"):
        manager.destroy(instance.id)
    assert len(host.objects()) == 1
    subprocess.run(["mount", "-o", "remount,rw", small_folder], check=True)
    manager.destroy(instance.id)
    assert host.objects() == []
