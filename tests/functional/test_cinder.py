# SPDX-License-Identifier: Apache-2.0
"""Instances' disks as volumes of a real Cinder, of types in Ceph and in files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from imagebackend.model import FileSource, NetworkSource, Severity
from imagebackend.model import Path as Way
from tests.cinder import MOUNTS, TYPES, CinderUnderTest, unmount
from tests.cloud import Cloud, wait
from tests.conftest import GiB, HostUnderTest, MiB, read_disk
from tests.functional.test_glance import Images
from tests.functional.test_guest import larger, running
from tests.functional.test_verbs import connected, with_root, write

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def images() -> Iterator[Images]:
    made = Images()
    yield made
    made.remove()


@pytest.fixture(scope="module")
def guest_image(
    cloud: Cloud, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The small guest in Glance, raw: what storages clone."""
    raw = tmp_path_factory.mktemp("guest") / "guest.raw"
    subprocess.run(
        [
            *("qemu-img", "convert", "-f", "qcow2", "-O", "raw"),
            *(os.environ["IMAGEBACKEND_GUEST_IMAGE"], raw),
        ],
        check=True,
    )
    made = Images()
    yield made.upload(cloud.admin, raw.read_bytes(), visibility="public")
    made.remove()


@pytest.fixture
def host(host: HostUnderTest, cinder: CinderUnderTest) -> Iterator[HostUnderTest]:
    """A host in a folder that QEMU's own user may enter, with images of Glance."""
    state = Path("/var/tmp") / f"imagebackend-test-{uuid.uuid4()}"
    (state / "images").mkdir(parents=True)
    state.chmod(0o711)
    host.path = state
    host.set("state_path", str(state))
    with open(host.conf.config_file[0], "a") as file:
        file.write("[imagebackend_images]\nsource = glance\n")
        file.write(cinder.cloud.section("imagebackend_glance"))
    host.enable_cinder(cinder)
    with secret.restored(host.conf):
        yield host
    unmount(state)
    shutil.rmtree(state)


@pytest.fixture
def manager(host: HostUnderTest) -> DiskManager:
    return host.manager()


def agree(host: HostUnderTest, manager: DiskManager) -> None:
    """Rows and Cinder are equal, told by Cinder alone, and nothing is left to do."""
    assert list(manager.recover(dry_run=True)) == []
    assert [each for each in manager.audit() if each.severity is not Severity.OK] == []
    cinder = host.cinder
    assert cinder is not None
    disks = [disk for disk in manager.list() if disk.backend == "cinder"]
    volumes = {each["id"]: each for each in cinder.volumes()}
    assert {disk.handle["volume"]: disk.size for disk in disks} == {
        key: each["size"] * GiB for key, each in volumes.items()
    }
    for disk in disks:
        status = volumes[disk.handle["volume"]]["status"]
        assert status == ("in-use" if disk.connected else "reserved"), disk
    attached = [each for each in cinder.attachments() if each["status"] == "attached"]
    reserved = [each for each in cinder.attachments() if each["status"] == "reserved"]
    assert len(attached) == sum(disk.connected for disk in disks)
    assert len(reserved) == len(disks)
    assert cinder.snapshots() == []


def of(cinder: CinderUnderTest, manager: DiskManager, instance_id: str) -> Any:
    """The root disk's volume."""
    (root,) = [each for each in manager.list(instance_id) if each.name == "root"]
    return cinder.get(f"/volumes/{root.handle['volume']}")["volume"]


# --- the main job ---------------------------------------------------------------


@TYPES
def test_a_guest_boots_from_the_flavors_volume_type_and_lives_there(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    guest_image: str,
    volume_type: str,
) -> None:
    instance = host.instance(
        guest_image, swap_mb=64, imagebackend__volume_type=volume_type
    )
    (planned, _) = manager.plan(instance).disks
    assert planned.placement.path is Way.CLONE
    change = manager.create(instance)
    assert [each.path for each in change.created] == [Way.CLONE, Way.BLANK]
    volume = of(cinder, manager, instance.id)
    assert volume["volume_type"] == volume_type and volume["status"] == "reserved"
    network = volume_type.startswith("rbd")
    with running(manager, instance) as guest:
        assert guest.report().boot == 1
        agree(host, manager)
        live = Guest.lookup(host.conf, instance.id)
        if network:
            manager.resize(larger(instance, 2), live)
            guest.command("disks")
            assert {disk.bytes for disk in guest.report().disks} == {GiB, 2 * GiB}
            instance = larger(instance, 2)
        else:
            with pytest.raises(exc.NotSupported, match="stop the guest first"):
                manager.resize(larger(instance, 2), live)
        agree(host, manager)
        guest.poweroff()
    with running(manager, instance) as guest:
        assert guest.report().boot == 2
        guest.poweroff()
    manager.rebuild(instance)
    agree(host, manager)
    if not network:
        manager.resize(larger(instance, 2))
        agree(host, manager)
    with running(manager, instance) as guest:
        assert guest.report().boot == 1
        assert {disk.bytes for disk in guest.report().disks} == {GiB, 2 * GiB}
        guest.poweroff()
    # No byte of it on this host, but where a share of the type is mounted.
    local = [path for path in host.files("") if not path.startswith("mnt/")]
    assert [path for path in local if path.startswith(("cache", "instances"))] == []
    manager.destroy(instance.id)
    assert cinder.volumes() == [] and cinder.attachments() == []


def test_flavors_of_one_host_go_to_two_storages_and_stay_there(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    guest_image: str,
) -> None:
    host.set("default_backend", "qcow2")
    local = host.instance(guest_image)
    far = host.instance(guest_image, imagebackend__volume_type="rbd2")
    manager.create(local)
    manager.create(far)
    with running(manager, local) as one, running(manager, far) as two:
        assert (one.report().boot, two.report().boot) == (1, 1)
        one.poweroff()
        two.poweroff()
    host.set("default_backend", "cinder")
    later = host.manager()
    for instance in (local, far):
        later.rebuild(instance)
        later.resize(with_root(instance, 2))
    assert [disk.backend for disk in later.list(local.id)] == ["qcow2"]
    assert of(cinder, later, far.id)["volume_type"] == "rbd2"
    third = host.instance(guest_image)
    later.create(third)
    assert [disk.backend for disk in later.list(third.id)] == ["cinder"]
    agree(host, later)
    for instance in (local, far, third):
        later.destroy(instance.id)
    assert host.objects() == []


@MOUNTS
@TYPES
def test_each_disk_of_an_instance_may_have_a_type_of_its_own(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
    volume_type: str,
) -> None:
    data = os.urandom(MiB)
    instance = host.instance(
        images.upload(cinder.cloud.admin, data, visibility="public"),
        ephemeral_gb=1,
        swap_mb=1100,
        imagebackend__volume_type=volume_type,
        imagebackend__ephemeral_volume_type="rbd2",
        imagebackend__swap_volume_type="nfs2",
    )
    manager.create(instance)
    types = {each["name"].split(".")[0]: each for each in cinder.volumes()}
    assert {name: each["volume_type"] for name, each in types.items()} == {
        "root": volume_type,
        "ephemeral0": "rbd2",
        "swap": "nfs2",
    }
    assert types["swap"]["size"] == 2
    with connected(manager, instance.id) as (root, ephemeral, swap):
        assert isinstance(ephemeral, NetworkSource) and isinstance(swap, FileSource)
        assert read_disk(root, 0, MiB) == data
        assert read_disk(ephemeral, 0, MiB)[1080:1082] == b"\x53\xef"  # ext4
        assert read_disk(swap, 0, MiB)[4086:4096] == b"SWAPSPACE2"
        agree(host, manager)
    manager.destroy(instance.id)
    assert cinder.volumes() == []


@pytest.mark.parametrize(
    ("volume_type", "format_"),
    [("rbd1", "raw"), pytest.param("nfs1", "qcow2", marks=MOUNTS)],
)
def test_a_snapshot_is_an_image_with_the_disks_bytes(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
    volume_type: str,
    format_: str,
) -> None:
    data = os.urandom(MiB)
    image = images.upload(cinder.cloud.admin, data, visibility="public")
    instance = host.instance(image, imagebackend__volume_type=volume_type)
    manager.create(instance)
    with connected(manager, instance.id) as (source,):
        write(source, 0x5A, 5 * MiB)
    taken = str(uuid.uuid4())
    images.expect(cinder.cloud.admin, taken)
    manager.snapshot(instance.id, UploadTarget(taken, format_))
    agree(host, manager)
    copy = host.instance(taken, imagebackend__volume_type="rbd2")
    manager.create(copy)
    with connected(manager, copy.id) as (source,):
        assert read_disk(source, 0, MiB) == data
        assert read_disk(source, 5 * MiB, MiB) == b"\x5a" * MiB
    agree(host, manager)


@TYPES
def test_a_running_guest_is_snapshotted_by_whoever_can(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
    guest_image: str,
    volume_type: str,
) -> None:
    instance = host.instance(guest_image, imagebackend__volume_type=volume_type)
    manager.create(instance)
    taken = images.expect(cinder.cloud.admin, str(uuid.uuid4()))
    with running(manager, instance) as guest:
        guest.command("write vda 100 1 kept")
        before = guest.command("sum vda 100 1")
        live = Guest.lookup(host.conf, instance.id)
        manager.snapshot(instance.id, UploadTarget(taken, "qcow2"), live)
        agree(host, manager)
        guest.poweroff()
    copy = host.instance(taken, imagebackend__volume_type=volume_type)
    manager.create(copy)
    with running(manager, copy) as guest:
        assert guest.command("sum vda 100 1") == before
        guest.poweroff()
    agree(host, manager)


def test_thirty_at_once_are_thirty(
    host: HostUnderTest, manager: DiskManager, cinder: CinderUnderTest, images: Images
) -> None:
    image = images.upload(cinder.cloud.admin, os.urandom(MiB), visibility="public")
    kinds = ("rbd1", "nfs1", "rbd2")
    instances = [
        host.instance(image, imagebackend__volume_type=kinds[number % 3])
        for number in range(30)
    ]
    with concurrent.futures.ThreadPoolExecutor(30) as pool:
        list(pool.map(manager.create, instances))
    agree(host, manager)
    assert len(cinder.volumes()) == 30
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda each: manager.destroy(each.id), instances))
    agree(host, manager)
    assert cinder.volumes() == []


# --- who may do what --------------------------------------------------------------


def test_the_tenant_neither_sees_nor_touches_what_the_service_owns(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
) -> None:
    member = cinder.cloud.member
    image = images.upload(member, os.urandom(MiB))
    instance = host.instance(
        image, project_id=member.project_id, imagebackend__volume_type="rbd1"
    )
    manager.create(instance, auth=member.auth)
    manager.connect(instance.id)
    volume = of(cinder, manager, instance.id)
    api = member.connection.block_storage
    assert api.get("/volumes/detail").json()["volumes"] == []
    assert api.get(f"/volumes/{volume['id']}").status_code == 404
    assert api.delete(f"/volumes/{volume['id']}").status_code == 404
    version = {"microversion": "3.71"}
    assert api.get("/attachments", **version).json()["attachments"] == []
    for each in cinder.attachments():
        answer = api.delete(f"/attachments/{each['id']}", **version)
        assert answer.status_code == 404, answer.text
    agree(host, manager)
    manager.disconnect(instance.id)


def test_a_private_type_is_refused_to_projects_without_access(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
) -> None:
    member, other = cinder.cloud.member, cinder.cloud.other
    image = images.upload(cinder.cloud.admin, os.urandom(MiB), visibility="public")
    with cinder.type_of("rbd1", private=True, projects=(member.project_id,)) as private:
        theirs = host.instance(
            image, project_id=other.project_id, imagebackend__volume_type=private
        )
        with pytest.raises(exc.PlacementRefused, match=private):
            manager.create(theirs)
        assert cinder.volumes() == [] and list(manager.list()) == []
        mine = dataclasses.replace(theirs, project_id=member.project_id)
        manager.create(mine)
        assert of(cinder, manager, mine.id)["volume_type"] == private
        # Who has it keeps it.
        cinder.withdraw(private, member.project_id)
        manager.resize(with_root(mine, 2))
        agree(host, manager)
        with pytest.raises(exc.PlacementRefused, match=private):
            manager.rebuild(with_root(mine, 2))
        agree(host, manager)
        manager.destroy(mine.id)


def test_a_private_image_is_refused_to_another_project(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
) -> None:
    image = images.upload(cinder.cloud.member, os.urandom(MiB))
    instance = host.instance(
        image,
        project_id=cinder.cloud.other.project_id,
        imagebackend__volume_type="rbd1",
    )
    for auth in (None, cinder.cloud.other.auth):
        with pytest.raises(exc.ImageNotFound):
            manager.create(instance, auth=auth)
    assert cinder.volumes() == []


@contextlib.contextmanager
def quota(cinder: CinderUnderTest, **limits: int) -> Iterator[None]:
    """Of the service's project."""
    project = cinder.service.project_id
    api = cinder.cloud.admin.block_storage
    answer = api.put(f"/os-quota-sets/{project}", json={"quota_set": limits})
    assert answer.status_code == 200, answer.text
    yield
    answer = api.delete(f"/os-quota-sets/{project}")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "limits",
    [
        {"volumes": 1},
        {"gigabytes": 2},
        {"per_volume_gigabytes": 1},
        {"volumes_rbd1": 1},
        {"gigabytes_rbd1": 2},
    ],
    ids=lambda limits: str(next(iter(limits))),
)
def test_over_a_quota_nothing_is_made_and_the_quota_is_named(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
    limits: dict[str, int],
) -> None:
    image = images.upload(cinder.cloud.admin, os.urandom(MiB), visibility="public")
    instance = host.instance(
        image, root_gb=2, swap_mb=64, imagebackend__volume_type="rbd1"
    )
    with quota(cinder, **limits):
        with pytest.raises(exc.StorageFull, match=r"(?i)volume|gigabytes|size"):
            manager.create(instance)
        assert cinder.volumes() == [] and list(manager.list()) == []
        agree(host, manager)


# --- what others do ---------------------------------------------------------------


def test_what_others_did_to_a_volume_is_told_and_not_made_worse(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
) -> None:
    image = images.upload(cinder.cloud.admin, os.urandom(MiB), visibility="public")

    def made() -> tuple[Instance, str]:
        instance = host.instance(image, imagebackend__volume_type="rbd1")
        manager.create(instance)
        return instance, of(cinder, manager, instance.id)["id"]

    instance, volume = made()
    cinder.action(volume, "os-reset_status", status="error")
    with pytest.raises(exc.IntegrityError, match="is error"):
        manager.connect(instance.id)
    (finding,) = [each for each in manager.audit() if each.severity is not Severity.OK]
    assert volume in finding.what
    manager.destroy(instance.id)

    instance, volume = made()
    cinder.force(f"/volumes/{volume}")
    wait(lambda: cinder.volumes() == [], "it is gone")
    with pytest.raises(exc.ObjectMissing, match=volume):
        manager.connect(instance.id)
    (finding,) = [each for each in manager.audit() if each.severity is not Severity.OK]
    assert "not in backend 'cinder' any more" in finding.what
    manager.destroy(instance.id)

    instance, volume = made()
    cinder.action(volume, "os-reset_status", status="available")
    cinder.action(volume, "os-extend", new_size=3)
    wait(lambda: cinder.volumes()[0]["size"] == 3, "it has grown")
    cinder.action(volume, "os-reset_status", status="reserved")
    assert any("somebody else resized it" in each.advice for each in manager.audit())
    manager.resize(with_root(instance, 3))
    manager.connect(instance.id)
    agree(host, manager)
    manager.disconnect(instance.id)
    manager.destroy(instance.id)
    assert cinder.volumes() == []


def test_a_volume_with_foreign_metadata_is_not_touched(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
) -> None:
    image = images.upload(cinder.cloud.admin, os.urandom(MiB), visibility="public")
    instance = host.instance(image, imagebackend__volume_type="rbd1")
    manager.create(instance)
    volume = of(cinder, manager, instance.id)["id"]
    key = "imagebackend_generation"
    (disk,) = manager.list(instance.id)
    cinder.set_metadata(volume, {key: str(uuid.uuid4())})
    for verb in (manager.connect, manager.destroy):
        with contextlib.suppress(exc.IntegrityError):
            verb(instance.id)
    assert [each["id"] for each in cinder.volumes()] == [volume]
    cinder.set_metadata(volume, {key: str(disk.generation_id)})
    manager.destroy(instance.id)
    assert cinder.volumes() == []


def test_a_snapshot_of_somebody_elses_keeps_the_volume(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
) -> None:
    image = images.upload(cinder.cloud.admin, os.urandom(MiB), visibility="public")
    instance = host.instance(image, imagebackend__volume_type="rbd1")
    manager.create(instance)
    volume = of(cinder, manager, instance.id)["id"]
    cinder.action(volume, "os-reset_status", status="available")
    cinder.snapshot(volume, "nightly")
    with contextlib.suppress(exc.Busy):
        manager.destroy(instance.id)
    assert [each["name"] for each in cinder.snapshots()] == ["nightly"]
    assert [each["id"] for each in cinder.volumes()] == [volume]
    for each in cinder.snapshots():
        cinder.force(f"/snapshots/{each['id']}")
    wait(lambda: cinder.snapshots() == [], "it is gone")
    list(manager.recover(dry_run=False))
    assert cinder.volumes() == []


@MOUNTS
def test_a_disk_may_be_the_base_of_another_in_another_type(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
) -> None:
    data = os.urandom(MiB)
    image = images.upload(cinder.cloud.admin, data, visibility="public")
    first = host.instance(image, imagebackend__volume_type="rbd1")
    manager.create(first)
    (root,) = manager.list(first.id)
    second = host.instance(image, imagebackend__volume_type="nfs1")
    spec = DiskSpec(name="data", base=root.id, volume_type="nfs1")
    manager.create(
        dataclasses.replace(second, flavor=None),
        [DiskSpec(role=Role.ROOT, size=GiB, image=image, volume_type="nfs1"), spec],
    )
    with connected(manager, second.id) as (_, copy):
        assert read_disk(copy, 0, MiB) == data
    agree(host, manager)


# --- rebuilt in place ---------------------------------------------------------------


def option(host: HostUnderTest, name: str, value: object) -> None:
    """Of Cinder's group, in the file, as an operator sets it."""
    path = Path(host.conf.config_file[0])
    text = path.read_text().replace("[cinder]\n", f"[cinder]\n{name} = {value}\n")
    path.write_text(text)
    host.conf.reload_config_files()


@TYPES
def test_a_rebuild_in_place_keeps_the_volume_and_none_of_its_bytes(
    host: HostUnderTest,
    cinder: CinderUnderTest,
    images: Images,
    volume_type: str,
) -> None:
    data = os.urandom(MiB)
    first = images.upload(cinder.cloud.admin, os.urandom(MiB), visibility="public")
    second = images.upload(cinder.cloud.admin, data, visibility="public")
    option(host, "rebuild", "always")
    manager = host.manager()
    instance = host.instance(first, imagebackend__volume_type=volume_type)
    manager.create(instance)
    with connected(manager, instance.id) as (source,):
        write(source, 0x5A, 0, 700 * MiB)
    before = of(cinder, manager, instance.id)["id"]
    change = manager.rebuild(dataclasses.replace(instance, image=second))
    assert [each.new for each in change.recreated] == [
        each.old for each in change.recreated
    ]
    assert of(cinder, manager, instance.id)["id"] == before
    with connected(manager, instance.id) as (source,):
        assert read_disk(source, 0, MiB) == data
        for offset in (1, 5, 699):
            assert read_disk(source, offset * MiB, MiB) == bytes(MiB)
    agree(host, manager)


def test_where_quota_has_no_room_a_rebuild_is_in_place_if_that_is_wanted(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
) -> None:
    data = os.urandom(MiB)
    image = images.upload(cinder.cloud.admin, data, visibility="public")
    instance = host.instance(image, imagebackend__volume_type="rbd1")
    manager.create(instance)
    volume = of(cinder, manager, instance.id)["id"]
    with connected(manager, instance.id) as (source,):
        write(source, 0x5A)
    with quota(cinder, volumes=1):
        with pytest.raises(exc.StorageFull, match="volumes"):
            manager.rebuild(instance)
        agree(host, manager)
        with connected(manager, instance.id) as (source,):
            assert read_disk(source, 0, MiB) == b"\x5a" * MiB
        option(host, "rebuild", "when-full")
        later = host.manager()
        later.rebuild(instance)
        assert of(cinder, later, instance.id)["id"] == volume
    with connected(later, instance.id) as (source,):
        assert read_disk(source, 0, MiB) == data
    agree(host, later)
    later.rebuild(instance)
    assert of(cinder, later, instance.id)["id"] != volume
    agree(host, later)


def test_a_rebuild_in_place_that_fails_says_so_and_the_next_one_heals_it(
    host: HostUnderTest,
    cinder: CinderUnderTest,
    images: Images,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from imagebackend.backends.cinder_volume import CinderBackend

    data = os.urandom(MiB)
    image = images.upload(cinder.cloud.admin, data, visibility="public")
    option(host, "rebuild", "always")
    manager = host.manager()
    instance = host.instance(image, imagebackend__volume_type="rbd1")
    manager.create(instance)

    def broken(*_args: object) -> None:
        raise exc.StorageError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(CinderBackend, "_reimage_by_cinder", broken)
        with pytest.raises(exc.StorageError, match="half way"):
            manager.rebuild(instance)
    (disk,) = manager.list(instance.id)
    assert str(disk.state) == "failed" and "neither" in disk.reason
    with pytest.raises(exc.Conflict, match="rebuild"):
        manager.connect(instance.id)
    manager.rebuild(instance)
    with connected(manager, instance.id) as (source,):
        assert read_disk(source, 0, MiB) == data
    agree(host, manager)


# --- owned by the tenant, and shared --------------------------------------------------


def test_owned_by_the_tenant_volumes_are_made_in_its_name_and_seen(
    host: HostUnderTest, cinder: CinderUnderTest, images: Images
) -> None:
    member = cinder.cloud.member
    option(host, "owner", "tenant")
    manager = host.manager()
    image = images.upload(member, os.urandom(MiB))
    instance = host.instance(
        image, project_id=member.project_id, imagebackend__volume_type="rbd1"
    )
    with pytest.raises(exc.PlacementRefused, match="credentials"):
        manager.create(instance)
    manager.create(instance, auth=member.auth)
    api = member.connection.block_storage
    (volume,) = api.get("/volumes/detail").json()["volumes"]
    assert volume["status"] == "reserved" and cinder.volumes() == []
    # Reserved: its owner cannot delete it.
    assert api.delete(f"/volumes/{volume['id']}").status_code == 400
    manager.connect(instance.id)
    (volume,) = api.get("/volumes/detail").json()["volumes"]
    assert volume["status"] == "in-use"
    assert [each for each in manager.audit() if each.severity is not Severity.OK] == []
    # What its owner writes into the metadata of another one proves nothing.
    body = {"size": 1, "volume_type": "rbd1", "metadata": volume["metadata"]}
    answer = api.post("/volumes", json={"volume": body})
    planted = answer.json()["volume"]["id"]

    def there() -> bool:
        seen = api.get(f"/volumes/{planted}").json()["volume"]
        return bool(seen["status"] == "available")

    wait(there, "the planted one")
    told = [each for each in manager.audit() if each.severity is Severity.ERROR]
    assert [planted in each.subject for each in told] == [True]
    list(manager.recover(dry_run=False))
    manager.disconnect(instance.id)
    # Without the caller: what it takes for a while is the service's.
    taken = images.expect(cinder.cloud.admin, str(uuid.uuid4()))
    manager.snapshot(instance.id, UploadTarget(taken, "raw"))
    assert cinder.volumes() == [] and cinder.snapshots() == []
    manager.rebuild(instance, auth=member.auth)
    manager.destroy(instance.id)
    left = [each["id"] for each in api.get("/volumes/detail").json()["volumes"]]
    assert left == [planted]
    assert api.delete(f"/volumes/{planted}").status_code == 202


def test_a_shareable_disk_needs_a_type_that_can_and_has_two_instances(
    host: HostUnderTest, manager: DiskManager, cinder: CinderUnderTest
) -> None:
    shared = DiskSpec(
        name="shared", size=GiB, shareable=True, lifecycle=Lifecycle.PERSISTENT
    )
    one, two = (dataclasses.replace(host.instance(None), flavor=None) for _ in range(2))
    with pytest.raises(exc.NotSupported, match="multiattach"):
        manager.create(one, [dataclasses.replace(shared, volume_type="rbd1")])
    with cinder.type_of("rbd1", multiattach="<is> True") as kind:
        manager.create(one, [dataclasses.replace(shared, volume_type=kind)])
        (disk,) = manager.list(one.id)
        manager.create(two, [DiskSpec(name="shared", disk=disk.id)])
        manager.connect(one.id)
        manager.connect(two.id)
        manager.disconnect(one.id)
        assert cinder.volumes()[0]["status"] == "in-use"
        manager.disconnect(two.id)
        assert cinder.volumes()[0]["status"] == "reserved"
        manager.destroy(one.id)
        manager.destroy(two.id)
        manager.delete_disk(disk.id)
        assert cinder.volumes() == []


# --- what an operator asks ----------------------------------------------------------


def test_config_check_answers_an_operator(
    host: HostUnderTest, cinder: CinderUnderTest, tmp_path: Path
) -> None:
    command = str(Path(sys.executable).with_name("imagebackend"))
    far = {
        "imagebackend:volume_type": "rbd2",
        "imagebackend:ephemeral_volume_type": "nfs1",
    }
    wrong = {"imagebackend:volume_type": "no-such"}
    flavors = [
        {"Name": "far", "Disk": 2, "Ephemeral": 1, "Swap": "", "Properties": far},
        {"Name": "nowhere", "Disk": 1, "Properties": wrong},
    ]
    file = tmp_path / "flavors.json"
    file.write_text(json.dumps(flavors))
    config = Path(host.conf.config_file[0])
    text = config.read_text().replace("raw\n", "raw, cinder\n", 1)
    config.write_text(text.replace(f"{tmp_path}/host", str(host.path)))
    done = subprocess.run(
        [
            *(command, "--config-file", config, "config", "check"),
            *("--flavors", file, "--project", cinder.cloud.member.project_id),
            *("-f", "value"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = done.stdout
    assert "Cinder 3.71 at" in told and "the service token is accepted" in told
    assert re.search(r"may use volume types .*nfs1.*rbd1", told)
    assert (
        "root 2048 MiB to cinder (rbd2), ephemeral0 1024 MiB to cinder (nfs1)" in told
    )
    (line,) = [line for line in told.splitlines() if line.startswith("error")]
    assert "nowhere" in line and "no-such" in line
    assert cinder.service.options["password"] not in done.stdout + done.stderr


@MOUNTS
def test_a_volume_in_a_file_with_somebodys_snapshot_is_still_the_disk(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    guest_image: str,
) -> None:
    instance = host.instance(guest_image, imagebackend__volume_type="nfs1")
    manager.create(instance)
    volume = of(cinder, manager, instance.id)["id"]
    cinder.action(volume, "os-reset_status", status="available")
    cinder.snapshot(volume, "nightly")
    cinder.action(volume, "os-reset_status", status="reserved")
    with running(manager, instance) as guest:
        assert guest.report().boot == 1
        guest.poweroff()
    with running(manager, instance) as guest:
        assert guest.report().boot == 2
        guest.poweroff()
