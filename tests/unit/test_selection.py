# SPDX-License-Identifier: Apache-2.0
"""From flavor, image and host to a place; and what is refused on the way."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagebackend import DiskManager, DiskSpec, Flavor, Instance, Lifecycle, Role
from imagebackend import exceptions as exc
from imagebackend.model import GiB, MiB, Plan
from imagebackend.selection import next_device
from imagebackend.validation import FLAVOR_KEYS, QUOTA_KEYS
from tests.conftest import HostUnderTest


@pytest.fixture
def two(host: HostUnderTest) -> HostUnderTest:
    """A host with two backends of one driver and one of another."""
    with host.config_file.open("a") as file:
        for name in ("fast", "slow"):
            file.write(f"[{name}]\ndriver = qcow2\n")
            file.write(f"instances_path = {host.path}/{name}\n")
    host.conf.reload_config_files()
    host.set("enabled_backends", ["fast", "slow", "raw"])
    host.raw_image()
    return host


def places(plan: Plan) -> dict[str, str]:
    return {disk.name: disk.placement.backend for disk in plan.disks}


# --- where a disk goes ------------------------------------------------------------


def test_the_first_backend_is_the_default(two: HostUnderTest) -> None:
    plan = two.manager().plan(two.instance(ephemeral_gb=1, swap_mb=1))
    assert set(places(plan).values()) == {"fast"}
    assert {disk.why for disk in plan.disks} == {"host"}


def test_host_options_choose_by_role(two: HostUnderTest) -> None:
    two.set("default_backend", "slow")
    two.set("ephemeral_backend", "raw")
    two.set("swap_backend", "fast")
    plan = two.manager().plan(two.instance(ephemeral_gb=1, swap_mb=1))
    assert places(plan) == {"root": "slow", "ephemeral0": "raw", "swap": "fast"}


def test_a_flavor_goes_before_the_host_and_its_own_key_first(
    two: HostUnderTest,
) -> None:
    instance = two.instance(
        ephemeral_gb=1,
        swap_mb=1,
        imagebackend__backend="slow",
        imagebackend__swap_backend="raw",
    )
    plan = two.manager().plan(instance)
    assert places(plan) == {"root": "slow", "ephemeral0": "slow", "swap": "raw"}
    assert "flavor 'small'" in plan.disks[0].why


def test_a_disks_own_word_goes_before_the_flavor(two: HostUnderTest) -> None:
    instance = two.instance(ephemeral_gb=1, imagebackend__backend="slow")
    spec = DiskSpec(name="scratch", size=MiB, backend="raw")
    assert places(two.manager().plan(instance, [spec]))["scratch"] == "raw"


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("imagebackend:bakend", "fast", FLAVOR_KEYS),
        ("imagebackend:backend", "nowhere", ("fast", "slow", "raw")),
        ("imagebackend:swap_backend", "nowhere", ("fast", "slow", "raw")),
        ("imagebackend:volume_type", "gold", ("fast", "slow", "raw")),
    ],
)
def test_what_a_flavor_may_not_say_is_refused_with_what_it_may(
    two: HostUnderTest, key: str, value: str, wanted: tuple[str, ...]
) -> None:
    instance = two.instance(swap_mb=1, **{key.replace(":", "__"): value})
    manager = two.manager()
    with pytest.raises(exc.PlacementRefused) as caught:
        manager.create(instance)
    assert "small" in caught.value.message
    assert all(each in caught.value.message for each in wanted)
    assert list(manager.list()) == [] and two.files() == []


def test_a_pool_is_refused_where_there_are_none(two: HostUnderTest) -> None:
    with pytest.raises(exc.PlacementRefused, match="no pools"):
        two.manager().plan(two.instance(imagebackend__pool="ssd"))


def test_a_host_may_keep_flavors_from_choosing(two: HostUnderTest) -> None:
    two.set("allow_flavor_override", False)
    with pytest.raises(exc.PlacementRefused, match="allow_flavor_override"):
        two.manager().plan(two.instance(imagebackend__backend="slow"))
    two.manager().plan(two.instance(quota__disk_read_iops_sec="5"))


def test_a_default_that_is_not_enabled_is_a_configuration_error(
    two: HostUnderTest,
) -> None:
    for option in ("default_backend", "ephemeral_backend", "swap_backend"):
        two.set(option, "nowhere")
        with pytest.raises(exc.ConfigError, match=option):
            two.manager().plan(two.instance(ephemeral_gb=1, swap_mb=1))
        two.set(option, None)


def test_an_images_volume_type_counts_only_where_the_host_allows_it(
    two: HostUnderTest,
) -> None:
    two.describe("raw-image", properties={"cinder_img_volume_type": "gold"})
    assert places(two.manager().plan(two.instance())) == {"root": "fast"}
    two.set("allow_image_volume_type", True)
    with pytest.raises(exc.PlacementRefused, match="gold"):
        two.manager().plan(two.instance())


def test_a_flavors_key_is_for_new_disks_only(two: HostUnderTest) -> None:
    manager = two.manager()
    instance = two.instance(imagebackend__backend="slow")
    manager.create(instance)
    two.set("enabled_backends", ["fast", "slow"])
    later = two.manager()
    assert [disk.backend for disk in later.list(instance.id)] == ["slow"]
    later.rebuild(instance)
    assert [disk.backend for disk in later.list(instance.id)] == ["slow"]


def test_a_slow_path_can_be_refused(two: HostUnderTest) -> None:
    two.set("slow_path", "refuse")
    two.manager().plan(two.instance())
    with pytest.raises(exc.PlacementRefused, match="slow_path"):
        two.manager().plan(two.instance(imagebackend__backend="raw"))


# --- sizes --------------------------------------------------------------------------


@pytest.mark.field("B6")
def test_a_root_disk_of_the_images_size_needs_a_limit_and_keeps_it(
    two: HostUnderTest,
) -> None:
    two.describe("raw-image", virtual_size=3 * GiB)
    instance = two.instance(root_gb=0)
    with pytest.raises(exc.SizeRefused, match="max_image_root_gb"):
        two.manager().plan(instance)
    two.set("max_image_root_gb", 2)
    with pytest.raises(exc.SizeRefused, match="2 GiB"):
        two.manager().plan(instance)
    two.set("max_image_root_gb", 3)
    assert two.manager().plan(instance).disks[0].size == 3 * GiB


def test_an_images_demands_are_kept(two: HostUnderTest) -> None:
    two.describe("raw-image", min_disk_gb=4)
    with pytest.raises(exc.SizeRefused, match="min_disk 4"):
        two.manager().plan(two.instance(root_gb=3))
    two.describe("raw-image", virtual_size=4 * GiB)
    with pytest.raises(exc.SizeRefused, match="needs"):
        two.manager().plan(two.instance(root_gb=3))
    assert two.manager().plan(two.instance(root_gb=4)).disks[0].size == 4 * GiB


@pytest.mark.field("B7")
def test_ephemeral_disks_fit_into_the_flavor_together(two: HostUnderTest) -> None:
    instance = two.instance(ephemeral_gb=3)
    halves = [DiskSpec(name=f"e{number}", size=GiB) for number in range(3)]
    plan = two.manager().plan(instance, halves)
    assert [disk.size for disk in plan.disks[1:]] == [GiB] * 3
    with pytest.raises(exc.SizeRefused, match="sum up"):
        two.manager().plan(instance, [*halves, DiskSpec(name="more", size=1)])
    with pytest.raises(exc.SizeRefused, match="swap"):
        two.manager().plan(instance, [DiskSpec(role=Role.SWAP, size=MiB)])
    persistent = DiskSpec(name="data", size=9 * GiB, lifecycle=Lifecycle.PERSISTENT)
    assert len(two.manager().plan(instance, [*halves, persistent]).disks) == 5


@pytest.mark.field("B10")
@pytest.mark.parametrize(
    "size", [-1, True, 1.5, float("nan"), "10", 2**40 * GiB, 2**200, None, b"1"]
)
def test_sizes_that_cannot_be_are_refused(two: HostUnderTest, size: Any) -> None:
    manager = two.manager()
    spec = DiskSpec(name="data", size=size, lifecycle=Lifecycle.PERSISTENT)
    with pytest.raises((exc.InvalidValue, exc.SizeRefused), match=r"data|size"):
        manager.create(two.instance(), [spec])
    for field in ("root_gb", "ephemeral_gb", "swap_mb"):
        flavor = dataclasses.replace(Flavor("odd", root_gb=1), **{field: size})
        with pytest.raises((exc.InvalidValue, exc.SizeRefused)):
            manager.create(dataclasses.replace(two.instance(), flavor=flavor))
    assert list(manager.list()) == [] and two.files() == []


def test_a_size_that_is_no_multiple_of_a_sector_is_rounded_up(
    two: HostUnderTest,
) -> None:
    spec = DiskSpec(name="data", size=1000, lifecycle=Lifecycle.PERSISTENT)
    plan = two.manager().plan(two.instance(), [spec])
    assert plan.disks[1].size == 1024


# --- names, ids, contents -----------------------------------------------------------

BAD_NAMES = (
    "../up",
    "/abs",
    "a/b",
    "json:{}",
    "rbd:pool/x",
    "nbd://host",
    "with space",
    "new\nline",
    "esc\x1b[2J",
    "nul\0",
    ".hidden",
    "-dash",
    "UPPER",
    "ümlaut",
    "x" * 41,
)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_be_something_else_are_refused(
    two: HostUnderTest, name: str
) -> None:
    spec = DiskSpec(name=name, size=MiB, lifecycle=Lifecycle.PERSISTENT)
    with pytest.raises(exc.InvalidValue, match="name of a disk") as caught:
        two.manager().plan(two.instance(), [spec])
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "name", [*BAD_NAMES, "", "1", "8BE4DF61-93CA-11D2-AA0D-00E098032B8C"]
)
def test_an_instance_id_is_a_uuid_and_nothing_else(
    two: HostUnderTest, name: str
) -> None:
    manager = two.manager()
    with pytest.raises(exc.InvalidValue, match="instance id"):
        manager.create(two.instance(id=name or "no"))
    for verb in (
        manager.connect,
        manager.destroy,
        manager.taint,
        manager.libvirt_xml,
        manager.export_rows,
        manager.instance,
    ):
        with pytest.raises(exc.InvalidValue, match="instance id"):
            verb(name)
    with pytest.raises(exc.InvalidValue, match="disk id"):
        manager.delete_disk(name)


@pytest.mark.parametrize(
    "image", ["../x", "/etc/passwd", "json:{}", "a\nb", "", "x" * 200]
)
def test_an_image_id_is_no_path(two: HostUnderTest, image: str) -> None:
    spec = DiskSpec(role=Role.ROOT, image=image, size=GiB)
    with pytest.raises(exc.InvalidValue, match="image"):
        two.manager().plan(two.instance(None), [spec])


def test_two_disks_of_one_name_are_refused(two: HostUnderTest) -> None:
    spec = DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)
    with pytest.raises(exc.InvalidValue, match="unique"):
        two.manager().plan(two.instance(), [spec, spec])
    with pytest.raises(exc.InvalidValue, match="one root"):
        two.manager().plan(
            two.instance(),
            [
                DiskSpec(name="a", role=Role.ROOT, size=MiB),
                DiskSpec(name="b", role=Role.ROOT, size=MiB),
            ],
        )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"size": 0}, "given, or one of"),
        ({"image": "raw-image", "base": str(uuid.uuid4())}, "one of image, base"),
        ({"image": "raw-image", "fs": "ext4"}, "left out"),
        ({"fs": "ntfs"}, "ext4, xfs, vfat, swap"),
        ({"label": "too long for any file system"}, "1 to 16"),
        ({"label": "a;b"}, "1 to 16"),
        ({"bus": "floppy"}, "virtio, scsi"),
        ({"cdrom": True, "bus": "virtio"}, "scsi, sata, ide"),
        ({"path": "relative.iso", "size": 0}, "absolute"),
        ({"path": "/nowhere/at.all", "size": 0}, "existing file"),
        ({"path": "/dev/null", "size": 0}, "existing file"),
        ({"base": "not-a-uuid"}, "uuid"),
        ({"disk": "not-a-uuid"}, "uuid"),
        ({"role": "boot"}, r"Role.ROOT"),
        ({"lifecycle": "for ever"}, r"Lifecycle"),
        ({"shareable": 1}, "true or false"),
        ({"label": 7}, "text or None"),
    ],
)
def test_specs_that_make_no_sense_are_refused_with_what_would(
    two: HostUnderTest, changes: dict[str, Any], wanted: str
) -> None:
    values: dict[str, Any] = {
        "name": "data",
        "size": MiB,
        "lifecycle": Lifecycle.PERSISTENT,
    }
    with pytest.raises(exc.InvalidValue, match=wanted):
        two.manager().plan(two.instance(), [DiskSpec(**(values | changes))])


def test_a_config_drive_has_a_limit(two: HostUnderTest, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    with drive.open("wb") as file:
        file.truncate(GiB)
    spec = DiskSpec(role=Role.CONFIG, path=str(drive))
    with pytest.raises(exc.InvalidValue, match="between 1 and"):
        two.manager().plan(two.instance(), [spec])
    drive.write_bytes(b"")
    with pytest.raises(exc.InvalidValue, match="between 1 and"):
        two.manager().plan(two.instance(), [spec])


# --- image properties and quotas ----------------------------------------------------


def test_image_properties_choose_bus_and_file_system(two: HostUnderTest) -> None:
    two.describe("raw-image", properties={"hw_disk_bus": "scsi", "os_type": "windows"})
    manager = two.manager()
    instance = two.instance(ephemeral_gb=1)
    plan = manager.plan(instance)
    assert [(disk.bus, disk.device) for disk in plan.disks] == [
        ("scsi", "sda"),
        ("scsi", "sdb"),
    ]
    manager.create(instance)
    rows = manager.export_rows(instance.id)
    assert [disk["spec"]["fs"] for disk in rows["disks"]] == [None, "vfat"]


def test_an_encrypted_disk_is_refused_rather_than_made_plain(
    two: HostUnderTest,
) -> None:
    two.describe("raw-image", properties={"hw_ephemeral_encryption": "true"})
    with pytest.raises(exc.PlacementRefused, match="hw_ephemeral_encryption"):
        two.manager().plan(two.instance())


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "", "9" * 30, "٣"])
def test_quotas_are_whole_numbers(two: HostUnderTest, value: str) -> None:
    for key in QUOTA_KEYS:
        with pytest.raises(exc.InvalidValue, match="whole number"):
            two.manager().plan(two.instance(**{key.replace(":", "__"): value}))


def test_a_total_and_its_parts_are_refused_as_qemu_would(two: HostUnderTest) -> None:
    instance = two.instance(
        quota__disk_total_iops_sec="10", quota__disk_read_iops_sec="5"
    )
    with pytest.raises(exc.InvalidValue, match="cannot have both"):
        two.manager().plan(instance)
    two.manager().plan(
        two.instance(quota__disk_total_iops_sec="10", quota__disk_read_bytes_sec="5")
    )


def test_device_names_go_on_after_z() -> None:
    taken: list[str] = []
    for _ in range(30):
        taken.append(next_device("virtio", taken))
    assert taken[0] == "vda" and taken[25] == "vdz" and taken[26] == "vdaa"
    assert next_device("sata", ["sda", "sdc"]) == "sdb"


# --- the kinds of the above, elsewhere ----------------------------------------------


@pytest.mark.field("B6")
def test_an_images_min_disk_counts_where_the_image_sizes_the_disk(
    two: HostUnderTest,
) -> None:
    two.describe("raw-image", virtual_size=GiB, min_disk_gb=3)
    two.set("max_image_root_gb", 2)
    with pytest.raises(exc.SizeRefused, match=r"raw-image needs 3221225472"):
        two.manager().plan(two.instance(root_gb=0))
    two.set("max_image_root_gb", 3)
    manager, instance = two.manager(), two.instance(root_gb=0)
    assert manager.create(instance).created[0].size == 3 * GiB
    manager.rebuild(instance)  # which asks for as much


@pytest.mark.field("B6")
def test_a_root_disk_that_the_caller_lists_has_the_same_limit(
    two: HostUnderTest,
) -> None:
    two.describe("raw-image", virtual_size=3 * GiB)
    spec = DiskSpec(role=Role.ROOT, image="raw-image")
    with pytest.raises(exc.SizeRefused, match="max_image_root_gb"):
        two.manager().plan(two.instance(root_gb=9), [spec])
    sized = dataclasses.replace(spec, size=4 * GiB)
    assert two.manager().plan(two.instance(root_gb=9), [sized]).disks[0].size == 4 * GiB


@pytest.mark.field("B7")
def test_a_disk_that_its_content_sizes_counts_with_that_size(
    two: HostUnderTest, tmp_path: Path
) -> None:
    two.describe("raw-image", virtual_size=2 * GiB)
    manager = two.manager()
    for ephemeral_gb, fits in ((1, False), (3, False), (4, True)):
        instance = two.instance(root_gb=2, ephemeral_gb=ephemeral_gb)
        specs = [DiskSpec(name=f"e{n}", image="raw-image") for n in range(2)]
        if fits:
            assert [disk.size for disk in manager.plan(instance, specs).disks] == [
                2 * GiB
            ] * 3
        else:
            with pytest.raises(exc.SizeRefused, match="sum up to 4294967296"):
                manager.plan(instance, specs)
    drive = tmp_path / "drive"
    drive.write_bytes(bytes(1000))
    with pytest.raises(exc.SizeRefused, match="sum up to 1000"):
        manager.plan(two.instance(root_gb=2), [DiskSpec("e", path=str(drive))])
    config = DiskSpec(role=Role.CONFIG, path=str(drive))
    assert manager.plan(two.instance(root_gb=2), [config]).disks[1].size == 1024


@pytest.mark.field("B7")
def test_two_ephemeral_disks_keep_their_own_sizes_through_a_resize(
    two: HostUnderTest,
) -> None:
    manager = two.manager()
    instance = two.instance(ephemeral_gb=3)
    manager.create(instance, [DiskSpec(name=f"e{n}", size=GiB) for n in range(2)])
    assert instance.flavor
    for ephemeral_gb in (1, 0):
        smaller = dataclasses.replace(instance.flavor, ephemeral_gb=ephemeral_gb)
        with pytest.raises(exc.SizeRefused, match="sum up"):
            manager.resize(dataclasses.replace(instance, flavor=smaller))
    larger = dataclasses.replace(instance.flavor, ephemeral_gb=9, root_gb=2)
    manager.resize(dataclasses.replace(instance, flavor=larger))
    sizes = {disk.name: disk.size for disk in manager.list(instance.id)}
    assert sizes == {"root": 2 * GiB, "e0": GiB, "e1": GiB}


def test_a_lower_limit_of_the_host_is_for_new_disks_and_growth(
    two: HostUnderTest,
) -> None:
    manager = two.manager()
    instance = two.instance(root_gb=3, ephemeral_gb=1)
    manager.create(instance)
    two.set("max_disk_gb", 2)
    assert instance.flavor
    for changes, fits in (({"ephemeral_gb": 2}, True), ({"root_gb": 4}, False)):
        values: dict[str, Any] = {"ephemeral_gb": 2, **changes}
        flavor = dataclasses.replace(instance.flavor, **values)
        if fits:
            manager.resize(dataclasses.replace(instance, flavor=flavor))
        else:
            with pytest.raises(exc.SizeRefused, match="max_disk_gb"):
                manager.resize(dataclasses.replace(instance, flavor=flavor))
    with pytest.raises(exc.SizeRefused, match="max_disk_gb"):
        manager.plan(two.instance(root_gb=3))


@pytest.mark.field("B10")
def test_a_limit_of_the_host_is_one_that_the_store_can_count(
    two: HostUnderTest,
) -> None:
    with pytest.raises(ValueError, match="less than or equal"):
        two.set("max_disk_gb", 2**40)
    two.set("max_disk_gb", 8589934591)
    with pytest.raises(exc.InvalidValue, match="root_gb"):
        two.manager().plan(two.instance(root_gb=2**40))
    assert two.manager().plan(two.instance(root_gb=2**32)).disks[0].size == 2**62


def test_the_disks_own_image_can_ask_for_encryption_too(two: HostUnderTest) -> None:
    two.raw_image("secret")
    two.describe("secret", properties={"hw_ephemeral_encryption": "on"})
    spec = DiskSpec(name="e", image="secret", lifecycle=Lifecycle.PERSISTENT)
    with pytest.raises(exc.PlacementRefused, match=r"encryption of image secret"):
        two.manager().plan(two.instance(), [spec])
    with pytest.raises(exc.PlacementRefused, match="hw:ephemeral_encryption"):
        two.manager().plan(two.instance(hw__ephemeral_encryption="True"))


@pytest.mark.parametrize("value", ["windows", "Windows", "WINDOWS"])
def test_windows_is_windows_however_it_is_written(
    two: HostUnderTest, value: str
) -> None:
    two.describe("raw-image", properties={"os_type": value})
    manager, instance = two.manager(), two.instance(ephemeral_gb=1)
    two.set("default_ephemeral_format", "ext4")
    found = manager._ctx.selection().wanted(instance, ())
    assert [each.recipe and each.recipe.fs for each in found] == [None, "vfat"]


@pytest.mark.parametrize(
    ("properties", "spec", "wanted"),
    [
        ({}, {}, ("virtio", "vdb")),
        ({"hw_disk_bus": "scsi"}, {}, ("scsi", "sdb")),
        ({"hw_disk_bus": "scsi"}, {"bus": "usb"}, ("usb", "sdb")),
        ({"hw_disk_bus": "scsi"}, {"cdrom": True}, ("sata", "sdb")),
        ({"hw_cdrom_bus": "ide"}, {"cdrom": True}, ("ide", "hda")),
        ({"hw_cdrom_bus": "ide"}, {"cdrom": True, "bus": "scsi"}, ("scsi", "sda")),
        ({"hw_cdrom_bus": "ide"}, {}, ("virtio", "vdb")),
    ],
)
def test_a_bus_is_the_disks_the_images_or_the_hosts(
    two: HostUnderTest,
    tmp_path: Path,
    properties: dict[str, str],
    spec: dict[str, Any],
    wanted: tuple[str, str],
) -> None:
    two.describe("raw-image", properties=properties)
    drive = tmp_path / "drive"
    drive.write_bytes(bytes(512))
    disk = DiskSpec(role=Role.CONFIG, path=str(drive), **spec)
    found = two.manager().plan(two.instance(), [disk]).disks[1]
    assert (found.bus, found.device) == wanted


@pytest.mark.parametrize("value", ["fdc", "VIRTIO", "", "xen", "\x1b[2J"])
@pytest.mark.parametrize("key", ["hw_disk_bus", "hw_cdrom_bus"])
def test_a_bus_that_an_image_has_wrong_is_refused_with_the_property(
    two: HostUnderTest, tmp_path: Path, key: str, value: str
) -> None:
    two.describe("raw-image", properties={key: value})
    drive = tmp_path / "drive"
    drive.write_bytes(bytes(512))
    disk = DiskSpec(role=Role.CONFIG, path=str(drive), cdrom=True)
    with pytest.raises(exc.InvalidValue, match=key) as caught:
        two.manager().plan(two.instance(), [disk])
    assert "sata, ide" in caught.value.message and caught.value.message.isprintable()


def test_a_bus_has_room_for_so_many(two: HostUnderTest) -> None:
    def disks(number: int) -> list[DiskSpec]:
        return [
            DiskSpec(f"d{n}", size=MiB, bus="ide", lifecycle=Lifecycle.PERSISTENT)
            for n in range(number)
        ]

    assert len(two.manager().plan(two.instance(), disks(4)).disks) == 5
    with pytest.raises(exc.InvalidValue, match=r"on bus ide is 5: .* at most 4"):
        two.manager().plan(two.instance(), disks(5))


@pytest.mark.parametrize("who", ["flavor", "disk"])
def test_a_volume_type_of_a_backend_that_has_none_is_refused_by_who_asked(
    two: HostUnderTest, who: str
) -> None:
    specs: list[DiskSpec] = []
    extra: dict[str, Any] = {}
    if who == "flavor":
        extra = {
            "imagebackend__backend": "raw",
            "imagebackend__volume_type": "gold",
        }
    else:
        specs = [DiskSpec("root", Role.ROOT, GiB, backend="raw", volume_type="gold")]
    with pytest.raises(exc.PlacementRefused) as caught:
        two.manager().plan(two.instance(**extra), specs)
    for word in (who, "'gold'", "'raw'"):
        assert word in caught.value.message


def test_an_existing_disk_is_not_attached_twice(two: HostUnderTest) -> None:
    manager, instance = two.manager(), two.instance()
    data = DiskSpec("data", size=MiB, lifecycle=Lifecycle.PERSISTENT)
    manager.create(instance, [data])
    manager.destroy(instance.id)
    (disk,) = manager.list()
    second = two.instance()
    specs = [DiskSpec("one", disk=disk.id), DiskSpec("two", disk=disk.id)]
    with pytest.raises(exc.InvalidValue, match="named once"):
        manager.create(second, specs)
    assert list(manager.list(second.id)) == [] and len(two.files("fast")) == 1


def test_a_refusal_leaves_nothing_anywhere(two: HostUnderTest) -> None:
    manager = two.manager()
    manager.create(two.instance())
    before = sorted(path for path in two.path.rglob("*") if path.is_file())
    for spec in (
        DiskSpec("a", size=GiB),
        DiskSpec("a", size=MiB, backend="nowhere", lifecycle=Lifecycle.PERSISTENT),
        DiskSpec("a", image="none", lifecycle=Lifecycle.PERSISTENT),
        DiskSpec("a", base=str(uuid.uuid4()), lifecycle=Lifecycle.PERSISTENT),
        DiskSpec("../a", size=MiB, lifecycle=Lifecycle.PERSISTENT),
    ):
        with pytest.raises(exc.RequestError):
            manager.create(two.instance(), [spec])
    after = sorted(path for path in two.path.rglob("*") if path.is_file())
    assert after == before and len(list(manager.list())) == 1


# --- anything at all ----------------------------------------------------------------

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    st.sampled_from(list(Role)),
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    spec=st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(DiskSpec)]),
        ANYTHING,
        max_size=6,
    ),
    flavor=st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(Flavor)]),
        ANYTHING,
        max_size=3,
    ),
    instance=st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(Instance)]),
        ANYTHING,
        max_size=3,
    ),
)
def test_no_request_whatever_raises_anything_but_our_errors(
    manager: DiskManager,
    spec: dict[str, Any],
    flavor: dict[str, Any],
    instance: dict[str, Any],
) -> None:
    made = Flavor(**({"name": "f", "root_gb": 1} | flavor))
    values = {"id": str(uuid.uuid4()), "flavor": made} | instance
    try:
        plan = manager.plan(Instance(**values), [DiskSpec(**spec)])
    except (exc.RequestError, exc.HostError) as error:
        assert error.message.isprintable(), error.message
    else:
        assert all(disk.size > 0 for disk in plan.disks)
