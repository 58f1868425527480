# SPDX-License-Identifier: Apache-2.0
"""What is refused in a request, whatever the host, and in which words."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebackend import DiskManager, UploadTarget, validation
from imagebackend import exceptions as exc
from imagebackend.model import (
    DiskSpec,
    Flavor,
    GiB,
    Instance,
    KiB,
    Lifecycle,
    MiB,
    Role,
)
from tests.conftest import HostUnderTest

ID = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
SPEC = DiskSpec(name="data", size=GiB, lifecycle=Lifecycle.PERSISTENT)
#: What Unicode has to confuse a terminal, a log, a database or XML.
NO_TEXT = ("nul\0", "esc\x1b[2J", "line\nfeed", "c1\x9b2J", "half\ud800", "par\u2029")


def check(spec: DiskSpec) -> None:
    validation.check_specs([spec])
    validation.check_spec(spec)


def changed(**changes: Any) -> DiskSpec:
    return dataclasses.replace(SPEC, **changes)


def disk(**values: Any) -> DiskSpec:
    return DiskSpec(name="data", **values)


def flavor(**changes: Any) -> Flavor:
    return dataclasses.replace(Flavor("small", root_gb=1), **changes)


# --- ids ------------------------------------------------------------------------------


@given(st.one_of(st.text(), st.binary(), st.integers(), st.none(), st.uuids()))
def test_an_id_is_a_uuid_in_one_spelling_only(value: Any) -> None:
    try:
        found = validation.check_id("disk id", value)
    except exc.InvalidValue as error:
        assert error.message.startswith("disk id is ")
    else:
        assert found == value == str(uuid.UUID(value))


@pytest.mark.parametrize(
    "value",
    [
        ID.upper(),
        ID.replace("-", ""),
        f"{{{ID}}}",
        f"urn:uuid:{ID}",
        f"{ID}\n",
        f"../{ID}",
        f" {ID}",
        uuid.UUID(ID),
    ],
)
def test_other_spellings_of_a_uuid_are_refused(value: Any) -> None:
    with pytest.raises(exc.InvalidValue, match="a uuid, in lower case"):
        validation.check_id("instance id", value)


# --- the instance ---------------------------------------------------------------------


@pytest.mark.parametrize("text", [*NO_TEXT, "x" * 256])
@pytest.mark.parametrize("field", ["project_id", "name", "availability_zone", "image"])
def test_texts_that_cannot_be_shown_or_stored_are_refused(
    field: str, text: str
) -> None:
    changes: dict[str, Any] = {field: text}
    instance = Instance(ID, **changes)
    with pytest.raises(exc.InvalidValue, match="printable") as caught:
        validation.check_instance(instance)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "text", ["web 1", "Zoë's Kübel 🪣", "名前", "non\u00a0breaking"]
)
def test_any_language_is_fine_for_a_name(text: str) -> None:
    validation.check_instance(Instance(ID, text, name=text, availability_zone=text))


def test_an_image_without_an_id_is_not_a_blank_disk() -> None:
    with pytest.raises(exc.InvalidValue, match="image of the instance"):
        validation.check_instance(Instance(ID, image=""))
    for key in ("image", "path", "backend", "pool", "volume_type"):
        with pytest.raises(exc.InvalidValue, match=f"{key} of disk 'data'"):
            check(changed(**{key: ""}))


@pytest.mark.field("B10")
@pytest.mark.parametrize("field", ["root_gb", "ephemeral_gb", "swap_mb"])
@pytest.mark.parametrize(
    "number",
    [-1, 2**40 * GiB, 2**63, 10**5000, True, 1.0, float("nan"), "1", None],
    ids=lambda number: str(number)[:20] if number != 10**5000 else "endless",
)
def test_numbers_of_a_flavor_are_whole_and_can_be_stored(
    field: str, number: Any
) -> None:
    with pytest.raises(exc.InvalidValue, match=field) as caught:
        validation.check_instance(Instance(ID, flavor=flavor(**{field: number})))
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("field", ["instance", "flavor", "disk"])
def test_something_else_altogether_is_refused(field: str) -> None:
    stranger: Any = {"id": ID, "name": "x"}
    with pytest.raises(exc.InvalidValue, match="of class"):
        if field == "instance":
            validation.check_instance(stranger)
        elif field == "flavor":
            validation.check_instance(Instance(ID, flavor=stranger))
        else:
            validation.check_specs([stranger])


# --- extra specs ----------------------------------------------------------------------


@pytest.mark.parametrize("specs", [None, [], "a=b", {"a": 1}, {1: "a"}])
def test_extra_specs_are_texts_by_texts(specs: Any) -> None:
    with pytest.raises(exc.InvalidValue, match="extra_specs"):
        validation.check_instance(Instance(ID, flavor=flavor(extra_specs=specs)))


def test_an_unknown_key_is_refused_with_flavor_key_and_all_known_ones() -> None:
    given_ = flavor(extra_specs={"imagebackend:bakcend": "raw"})
    with pytest.raises(exc.PlacementRefused) as caught:
        validation.check_flavor(given_, True)
    for word in ("'small'", "'imagebackend:bakcend'", *validation.FLAVOR_KEYS):
        assert word in caught.value.message
    assert caught.value.values == {"flavor": "small", "key": "imagebackend:bakcend"}


def test_other_peoples_keys_are_none_of_our_business() -> None:
    specs = {"hw:cpu_policy": "dedicated", "quota:vif_inbound_average": "x", "": ""}
    validation.check_flavor(flavor(extra_specs=specs), False)
    validation.check_flavor(None, False)


@pytest.mark.parametrize("value", ["", *NO_TEXT, "x" * 256])
@pytest.mark.parametrize("key", validation.FLAVOR_KEYS)
def test_a_keys_value_is_a_name(key: str, value: str) -> None:
    with pytest.raises(exc.InvalidValue) as caught:
        validation.check_flavor(flavor(extra_specs={key: value}), True)
    assert key in caught.value.message and "'small'" in caught.value.message


def test_a_flavor_that_asks_for_encryption_gets_no_plain_disk() -> None:
    for value in ("true", "True", "1", "yes", "on"):
        specs = {"hw:ephemeral_encryption": value}
        with pytest.raises(exc.PlacementRefused, match="ephemeral_encryption"):
            validation.check_flavor(flavor(extra_specs=specs), True)
    specs = {"hw:ephemeral_encryption": "false"}
    validation.check_flavor(flavor(extra_specs=specs), True)


@pytest.mark.parametrize(
    "value", ["-1", "x", "1.5", "", " 1", "1 ", "1\n", "+1", "1e3", "²", "٣", "0x10"]
)
@pytest.mark.parametrize("key", validation.QUOTA_KEYS)
def test_a_limit_is_a_whole_number(key: str, value: str) -> None:
    with pytest.raises(exc.InvalidValue, match=key):
        validation.check_flavor(flavor(extra_specs={key: value}), True)


def test_a_limit_is_none_that_qemu_refuses() -> None:
    key = validation.QUOTA_KEYS[0]
    validation.check_flavor(flavor(extra_specs={key: str(10**15)}), True)
    with pytest.raises(exc.InvalidValue, match=str(10**15)):
        validation.check_flavor(flavor(extra_specs={key: str(10**15 + 1)}), True)


@pytest.mark.parametrize("unit", ["bytes", "iops"])
@pytest.mark.parametrize("way", ["read", "write"])
def test_a_total_limit_excludes_its_parts_unless_one_is_off(
    unit: str, way: str
) -> None:
    total, part = f"quota:disk_total_{unit}_sec", f"quota:disk_{way}_{unit}_sec"
    with pytest.raises(exc.InvalidValue, match="either the total") as caught:
        validation.check_flavor(flavor(extra_specs={total: "5", part: "5"}), True)
    assert total in caught.value.message and part in caught.value.message
    for specs in ({total: "0", part: "5"}, {total: "5", part: "0"}):
        validation.check_flavor(flavor(extra_specs=specs), True)


# --- disk specs -----------------------------------------------------------------------


@pytest.mark.field("B10")
@pytest.mark.parametrize(
    "size",
    [-1, 2**63, 2**40 * GiB, 10**5000, True, 1.5, float("inf"), "10", None],
    ids=lambda size: str(size)[:20] if size != 10**5000 else "endless",
)
def test_a_size_is_a_number_of_bytes_that_a_file_can_have(size: Any) -> None:
    with pytest.raises(exc.InvalidValue, match="size of disk"):
        check(changed(size=size))
    check(changed(size=2**63 - 1))


@pytest.mark.parametrize("text", NO_TEXT)
@pytest.mark.parametrize(
    "field", ["name", "image", "path", "backend", "pool", "volume_type", "label"]
)
def test_no_text_of_a_disk_steers_a_terminal(field: str, text: str) -> None:
    size = 0 if field in ("image", "path") else GiB
    spec = changed(size=size, **{field: text})
    with pytest.raises(exc.InvalidValue, match=field) as caught:
        check(spec)
    assert caught.value.message.isprintable()


def test_contents_exclude_each_other(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.write_bytes(bytes(512))
    contents: dict[str, Any] = {
        "image": "i",
        "base": ID,
        "disk": ID,
        "path": str(drive),
    }
    for one in contents:
        check(disk(**{one: contents[one]}))
        for other in contents:
            if one < other:
                both = {one: contents[one], other: contents[other]}
                with pytest.raises(exc.InvalidValue, match="one of image, base"):
                    check(disk(**both))
        with pytest.raises(exc.InvalidValue, match=f"left out beside {one}"):
            check(disk(fs="ext4", **{one: contents[one]}))


def test_an_existing_disk_is_as_it_is() -> None:
    for key, value in {
        "size": GiB,
        "backend": "raw",
        "pool": "ssd",
        "volume_type": "gold",
        "label": "x",
    }.items():
        with pytest.raises(exc.InvalidValue, match=f"{key} of disk 'data'"):
            check(disk(disk=ID, **{key: value}))
    check(disk(disk=ID, bus="scsi", shareable=True))


def test_a_disk_is_attached_once_to_an_instance() -> None:
    specs = [DiskSpec(name="a", disk=ID), DiskSpec(name="b", disk=ID)]
    with pytest.raises(exc.InvalidValue, match="named once"):
        validation.check_specs(specs)
    validation.check_specs([SPEC, SPEC])  # no existing disk: nothing to name twice


def test_swap_space_is_blank_and_for_one_guest_alone() -> None:
    swap = DiskSpec(name="swap", role=Role.SWAP, size=GiB)
    check(swap)
    check(dataclasses.replace(swap, fs="swap", label="swap0"))
    for changes, wanted in (
        ({"shareable": True}, "shareable"),
        ({"fs": "ext4"}, "must be swap"),
        ({"image": "i"}, "swap space is blank"),
        ({"base": ID}, "swap space is blank"),
    ):
        with pytest.raises(exc.InvalidValue, match=wanted):
            check(dataclasses.replace(swap, **changes))


def test_no_instance_is_born_with_a_rescue_disk() -> None:
    with pytest.raises(exc.InvalidValue, match="rescue"):
        check(changed(role=Role.RESCUE))


def test_the_hosts_own_word_for_its_default_file_system_is_not_the_callers() -> None:
    with pytest.raises(exc.InvalidValue, match="one of ext4, xfs, vfat, swap"):
        check(changed(fs=validation.DEFAULT_FS))


@pytest.mark.parametrize(
    ("fs", "longest"), [("ext4", 16), ("xfs", 12), ("vfat", 11), ("swap", 16)]
)
def test_a_label_is_as_long_as_its_file_system_can_keep(fs: str, longest: int) -> None:
    check(changed(fs=fs, label="x" * longest))
    with pytest.raises(exc.InvalidValue, match=f"1 to {longest}"):
        check(changed(fs=fs, label="x" * (longest + 1)))
    for label in ("", "a b", "-\n", "é", "a/b", "$(id)"):
        with pytest.raises(exc.InvalidValue, match="label of disk 'data'"):
            check(changed(fs=fs, label=label))


@pytest.mark.parametrize(
    ("fs", "tool"), [("ext4", "mkfs.ext4 -q -F"), ("swap", "mkswap -q")]
)
def test_the_smallest_disk_with_a_file_system_can_have_it(
    tmp_path: Path, fs: str, tool: str
) -> None:
    sizes = [step * 8 * KiB for step in range(1, 64)]
    accepted = []
    for size in sizes:
        try:
            check(changed(fs=fs, size=size))
            accepted.append(size)
        except exc.SizeRefused as error:
            assert error.values["needed"] <= 300 * MiB  # type: ignore[operator]
    with (tmp_path / "disk").open("wb") as file:
        file.truncate(accepted[0])
    subprocess.run([*tool.split(), tmp_path / "disk"], check=True)


def test_there_are_not_more_disks_than_a_guest_can_have() -> None:
    specs = [changed(name=f"d{number}") for number in range(257)]
    with pytest.raises(exc.InvalidValue, match="at most 256"):
        validation.check_specs(specs)
    validation.check_specs(specs[:256])


# --- files of the caller --------------------------------------------------------------


def test_a_config_drive_is_a_file_within_its_limits(tmp_path: Path) -> None:
    drive, link, pipe = tmp_path / "drive", tmp_path / "link", tmp_path / "pipe"
    drive.write_bytes(b"x")
    link.symlink_to(drive)
    os.mkfifo(pipe)
    assert validation.file_size("path", str(drive)) == 1
    assert validation.file_size("path", str(link)) == 1
    drive.write_bytes(b"")
    for path, wanted in (
        (drive, "between 1 and 268435456"),
        (pipe, "existing file"),
        (tmp_path, "existing file"),
        (tmp_path / "none", "existing file"),
        (Path("drive"), "absolute"),
        (Path("/" + "x/" * 3000), "existing file"),
    ):
        with pytest.raises(exc.InvalidValue, match=wanted):
            validation.file_size("path", str(path))
    os.truncate(drive, 256 * MiB)
    assert validation.file_size("path", str(drive)) == 256 * MiB
    os.truncate(drive, 256 * MiB + 1)
    with pytest.raises(exc.InvalidValue, match="between 1 and"):
        validation.file_size("path", str(drive))


def test_a_file_that_cannot_be_read_is_the_requests_fault(tmp_path: Path) -> None:
    with pytest.raises(exc.InvalidValue, match="readable"):
        validation.file_digest(str(tmp_path))


# --- what is not even of the right kind -----------------------------------------------


@pytest.mark.parametrize("odd", [None, 5, "text", {}, uuid.UUID(ID), object()])
def test_the_manager_refuses_what_is_of_another_kind(
    host: HostUnderTest, manager: DiskManager, odd: Any
) -> None:
    instance = host.instance(None)
    manager.create(instance)
    for verb in (
        lambda: manager.plan(odd),
        lambda: manager.create(odd),
        lambda: manager.update(odd, []),
        lambda: manager.rebuild(odd),
        lambda: manager.resize(odd),
        lambda: manager.snapshot(odd, UploadTarget("image")),
        lambda: manager.snapshot(instance.id, odd),
        lambda: manager.snapshot(instance.id, UploadTarget(odd, disk_format=odd)),
        lambda: manager.snapshot(instance.id, UploadTarget("image", properties=5)),
        lambda: DiskManager(odd),
    ):
        with pytest.raises(exc.InvalidValue):
            verb()
    if odd is not None:
        for verb in (
            lambda: manager.resize(instance, odd),
            lambda: manager.snapshot(instance.id, UploadTarget("image"), odd),
        ):
            with pytest.raises(exc.InvalidValue, match="guest"):
                verb()
    if odd not in ("", {}):
        for verb in (
            lambda: manager.plan(instance, odd),
            lambda: manager.create(instance, odd),
            lambda: manager.update(instance, odd),
        ):
            with pytest.raises(exc.InvalidValue, match="disk"):
                verb()
    assert [disk.state for disk in manager.list()] == ["ready"]


def test_disks_may_come_from_anything_that_gives_them(
    host: HostUnderTest, manager: DiskManager
) -> None:
    instance = host.instance(None)
    spec = DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)
    change = manager.create(instance, iter([spec]))  # type: ignore[arg-type]
    assert [each.name for each in change.created] == ["root", "data"]
    assert manager.create(instance, (spec,)).kept
    with pytest.raises(exc.InvalidValue, match="number of disks"):
        manager.update(instance, itertools.repeat(spec))  # type: ignore[arg-type]


def test_a_secret_in_place_of_a_configuration_is_not_shown() -> None:
    with pytest.raises(exc.InvalidValue) as caught:
        DiskManager({"password": "geheim"})  # type: ignore[arg-type]
    assert "geheim" not in caught.value.message


@pytest.mark.parametrize("value", [ID.upper(), ID.replace("-", ""), uuid.UUID(ID)])
def test_a_uuid_in_another_form_is_told_what_form_it_must_have(value: object) -> None:
    with pytest.raises(exc.InvalidValue, match=r"text.*lower case and with dashes"):
        validation.check_id("instance id", value)


# --- anything at all ------------------------------------------------------------------

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**5000),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from([*NO_TEXT, ID, "/", "/etc/passwd", "default", "ext4", "virtio"]),
    st.binary(max_size=5),
    st.lists(st.text(max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    st.sampled_from([*Role, *Lifecycle]),
    st.builds(object),
)


def garbage(cls: type) -> st.SearchStrategy[Any]:
    fields = dataclasses.fields(cls)
    required = {
        field.name: ANYTHING
        for field in fields
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }
    optional = {field.name: ANYTHING for field in fields if field.name not in required}
    return st.fixed_dictionaries(required, optional=optional).map(
        lambda values: cls(**values)
    )


@given(garbage(Instance) | garbage(Flavor).map(lambda each: Instance(ID, flavor=each)))
def test_no_instance_whatever_passes_but_for_a_reason(instance: Instance) -> None:
    try:
        validation.check_instance(instance)
        validation.check_flavor(instance.flavor, True)
    except exc.RequestError as error:
        assert error.message.isprintable() and len(error.message) < 1000


@given(garbage(DiskSpec))
def test_no_disk_whatever_passes_but_for_a_reason(spec: DiskSpec) -> None:
    try:
        check(spec)
    except exc.RequestError as error:
        assert error.message.isprintable() and len(error.message) < 1000
    else:
        assert type(spec.size) is int and type(spec.role) is Role
