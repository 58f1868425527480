# SPDX-License-Identifier: Apache-2.0
"""What is Ceph's alone: clones, caps, dead clients, and a cluster out of order."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from imagebackend import DiskManager, DiskSpec, Instance, Lifecycle
from imagebackend import exceptions as exc
from imagebackend.backends.base import Backend
from imagebackend.images.file import FileSource
from imagebackend.model import GiB, MiB, NetworkSource, Severity
from imagebackend.model import Path as Way
from imagebackend.qemu_img import QemuImg
from imagebackend.testing.harness import Harness
from tests.ceph import POOLS, Ceph
from tests.conftest import HostUnderTest

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def host(host: HostUnderTest, ceph: Ceph) -> HostUnderTest:
    """Of the storages this host has only Ceph, and qcow2 beside it."""
    host.enable_rbd(ceph)
    host.set("enabled_backends", ["rbd", "qcow2"])
    return host


@pytest.fixture
def located(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Locations of images in the folder, as another source would tell them."""
    where: dict[str, str] = {}

    def locations(_self: object, info: object, **_: object) -> list[str]:
        found = where.get(info.id)  # type: ignore[attr-defined]
        return [found] if found else []

    monkeypatch.setattr(FileSource, "locations", locations)
    return where


def option(host: HostUnderTest, name: str, value: object) -> None:
    """Of the backend, in the file, as an operator sets it."""
    text = Path(host.conf.config_file[0]).read_text()
    lines = [line for line in text.splitlines() if not line.startswith(f"{name} =")]
    Path(host.conf.config_file[0]).write_text(
        "\n".join([*lines, f"{name} = {value}", ""])
    )
    host.conf.reload_config_files()


def no_trouble(manager: DiskManager) -> None:
    assert [each for each in manager.audit() if each.severity is not Severity.OK] == []
    assert list(manager.recover(dry_run=True)) == []


def image_of(manager: DiskManager, instance_id: str, name: str = "root") -> str:
    (handle,) = [each.handle for each in manager.list(instance_id) if each.name == name]
    return f"{handle['pool']}/{handle['image']}"


@dataclasses.dataclass
class Made:
    """A manager, an instance whose root disk it made, and the image that it is in."""

    manager: DiskManager
    instance: Instance
    image: str


@pytest.fixture
def made(host: HostUnderTest) -> Made:
    host.raw_image()
    manager = host.manager()
    instance = host.instance()
    manager.create(instance)
    return Made(manager, instance, image_of(manager, instance.id))


# --- clones -----------------------------------------------------------------------


@pytest.mark.field("D14", "D12")
@pytest.mark.parametrize("protected", [False, True])
def test_an_image_in_the_cluster_is_cloned(
    host: HostUnderTest, ceph: Ceph, located: dict[str, str], protected: bool
) -> None:
    data = host.raw_image(size=2 * MiB)
    located["raw-image"] = ceph.upload(host.images / "raw-image.raw", "images/base")
    if protected:
        ceph.rbd("snap", "protect", "images/base@snap")
    manager = host.manager()
    instance = host.instance()
    (planned,) = manager.plan(instance).disks
    assert planned.placement is not None
    assert planned.placement.path is Way.CLONE
    manager.create(instance)
    disk = image_of(manager, instance.id)
    facts = ceph.info(disk)
    assert (facts["parent"]["pool"], facts["parent"]["image"]) == ("images", "base")
    assert facts["size"] == GiB
    assert ceph.content(disk, 3 * MiB) == data + bytes(MiB)
    assert not (host.path / "cache").exists()
    # The image can go when the disk has its own copy.
    (root,) = manager.list(instance.id)
    manager.flatten(root.id)
    assert "parent" not in ceph.info(disk)
    assert ceph.content(disk, 2 * MiB) == data
    manager.flatten(root.id)
    no_trouble(manager)


@pytest.mark.field("D12", "F12")
def test_an_image_elsewhere_is_copied_unless_that_is_refused(
    host: HostUnderTest, ceph: Ceph, located: dict[str, str]
) -> None:
    data = host.raw_image()
    here = ceph.upload(host.images / "raw-image.raw", "images/base")
    located["raw-image"] = here.replace(ceph.fsid, str(uuid.uuid4()))
    manager = host.manager()
    instance = host.instance()
    (planned,) = manager.plan(instance).disks
    assert planned.placement is not None
    assert planned.placement.path is Way.COPY
    manager.create(instance)
    assert ceph.content(image_of(manager, instance.id), MiB) == data
    assert "parent" not in ceph.info(image_of(manager, instance.id))
    host.set("slow_path", "refuse")
    with pytest.raises(exc.PlacementRefused, match="slow_path"):
        manager.create(host.instance())
    assert len(ceph.images()) == 1


@pytest.mark.field("A11")
def test_an_image_that_is_not_raw_is_converted_wherever_it_lies(
    host: HostUnderTest, ceph: Ceph, located: dict[str, str]
) -> None:
    data = host.qcow2_image()
    where = ceph.upload(host.images / "qcow2-image.qcow2", "images/base")
    located["qcow2-image"] = where
    manager = host.manager()
    instance = host.instance("qcow2-image")
    (planned,) = manager.plan(instance).disks
    assert planned.placement is not None
    assert planned.placement.path is Way.CONVERT
    (made,) = manager.create(instance).created
    assert made.path is Way.CONVERT
    assert ceph.content(image_of(manager, instance.id), 8 * MiB) == data


def test_an_image_that_leaves_its_pool_meanwhile_is_copied(
    host: HostUnderTest,
    ceph: Ceph,
    located: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = host.raw_image()
    located["raw-image"] = f"rbd://{ceph.fsid}/images/gone/snap"
    manager = host.manager()
    instance = host.instance()
    manager.create(instance)
    assert ceph.content(image_of(manager, instance.id), MiB) == data
    assert "its bytes are copied instead" in caplog.text
    no_trouble(manager)


@pytest.mark.field("B7")
def test_an_image_larger_than_the_disk_is_refused_and_leaves_nothing(
    host: HostUnderTest, ceph: Ceph, located: dict[str, str]
) -> None:
    host.raw_image(size=2 * MiB)
    located["raw-image"] = ceph.upload(host.images / "raw-image.raw", "images/base")
    host.describe("raw-image", virtual_size=MiB)  # a lie
    manager = host.manager()
    spec = DiskSpec("data", image="raw-image", size=MiB, lifecycle=Lifecycle.PERSISTENT)
    with pytest.raises(exc.SizeRefused, match=str(2 * MiB)):
        manager.create(host.instance(image=None, root_gb=0), [spec])
    assert ceph.images() == [] and ceph.trash() == []


def test_an_old_cluster_clones_protected_snapshots_only_and_it_works(
    host: HostUnderTest, ceph: Ceph, located: dict[str, str]
) -> None:
    """Clone v1: the parent cannot go while clones hang on it."""
    host.raw_image()
    located["raw-image"] = ceph.upload(host.images / "raw-image.raw", "images/base")
    ceph.rbd("snap", "protect", "images/base@snap")
    ceph.ceph("config", "set", "client", "rbd_default_clone_format", "1")
    try:
        manager = host.manager()
        instance = host.instance()
        manager.create(instance)
        assert "parent" in ceph.info(image_of(manager, instance.id))
        manager.rebuild(instance)
        no_trouble(manager)
        manager.destroy(instance.id)
        assert ceph.images() == [] and ceph.trash() == []
    finally:
        ceph.ceph("config", "rm", "client", "rbd_default_clone_format")


# --- deletion ------------------------------------------------------------------------


@contextmanager
def client(ceph: Ceph, image: str, code: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process that has an image open for writing."""
    pool, name = image.split("/")
    script = (
        "import rados, rbd, sys\n"
        f"c = rados.Rados(conffile={ceph.conf!r}, rados_id='admin'); c.connect()\n"
        f"i = rbd.Image(c.open_ioctx({pool!r}), {name!r})\n"
        "i.write(b'x', 0)\n"
        f"{code}\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
        "i.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        if process.poll() is None:
            process.communicate("")


@pytest.mark.field("D1")
def test_a_disk_whose_client_was_killed_is_deleted_after_its_watch_ran_out(
    made: Made, ceph: Ceph
) -> None:
    manager, instance = made.manager, made.instance
    with client(ceph, image_of(manager, instance.id)) as process:
        process.kill()
        process.wait()
        manager.destroy(instance.id)
    assert ceph.images() == [] and ceph.trash() == []


def test_a_disk_that_a_client_has_open_is_kept_and_the_client_named(
    host: HostUnderTest, ceph: Ceph, made: Made
) -> None:
    option(host, "delete_timeout", 1)
    manager, instance = made.manager, made.instance
    disk = made.image
    with client(ceph, disk):
        with pytest.raises(exc.Busy, match=r"in use by client 127\.0\.0\.1"):
            manager.destroy(instance.id)
        assert ceph.images() == [disk]
    manager.destroy(instance.id)
    assert ceph.images() == []


@pytest.mark.field("D2", "D3")
def test_a_disk_with_clones_of_others_is_a_debt_and_collected_later(
    made: Made, ceph: Ceph
) -> None:
    manager, instance = made.manager, made.instance
    disk = made.image
    ceph.rbd("snap", "create", f"{disk}@imagebackend-left")
    ceph.rbd("clone", f"{disk}@imagebackend-left", "vms2/theirs")
    manager.destroy(instance.id)
    assert list(manager.list()) == []
    assert ceph.images() == ["vms2/theirs"] and ceph.trash() == [disk]
    (found,) = [each for each in manager.audit() if each.severity is Severity.WARNING]
    assert "trash" in found.what and "vms2/theirs" in found.what
    (tried,) = manager.recover(dry_run=False)
    assert tried.severity is Severity.ERROR and ceph.trash() == [disk]
    ceph.rbd("rm", "vms2/theirs")
    assert [each.what for each in manager.recover(dry_run=False)] == ["purged"]
    assert ceph.trash() == []
    no_trouble(manager)


@pytest.mark.field("D3", "F1")
def test_a_disk_with_clones_of_ours_goes_and_they_keep_their_bytes(
    host: HostUnderTest, ceph: Ceph
) -> None:
    data = host.raw_image()
    manager = host.manager()
    first, second = host.instance(), host.instance()
    manager.create(first)
    manager.create(second)
    parent, clone = (image_of(manager, each.id) for each in (first, second))
    # As a move or a snapshot of ours may leave them.
    ceph.rbd("snap", "create", f"{parent}@imagebackend-left")
    ceph.rbd("rm", clone)
    ceph.rbd("clone", f"{parent}@imagebackend-left", clone)
    manager.destroy(first.id)
    assert ceph.images() == [clone] and ceph.trash() == []
    assert "parent" not in ceph.info(clone)
    assert ceph.content(clone, MiB) == data


def test_a_snapshot_that_is_not_ours_keeps_the_disk(made: Made, ceph: Ceph) -> None:
    manager, instance = made.manager, made.instance
    disk = made.image
    ceph.rbd("snap", "create", f"{disk}@backup-monday")
    with pytest.raises(exc.Busy, match="backup-monday"):
        manager.destroy(instance.id)
    assert ceph.images() == [disk]
    ceph.rbd("snap", "rm", f"{disk}@backup-monday")
    manager.destroy(instance.id)
    assert ceph.images() == []


@pytest.mark.field("D2")
def test_a_disk_half_deleted_in_the_trash_or_gone_is_deleted(
    host: HostUnderTest, ceph: Ceph
) -> None:
    host.raw_image()
    manager = host.manager()
    half, trashed, gone = (host.instance() for _ in range(3))
    for each in (half, trashed, gone):
        manager.create(each)
    name = image_of(manager, half.id)
    header = "rbd_header." + ceph.info(name)["id"]
    with ceph.admin() as cluster, cluster.open_ioctx("vms") as ioctx:
        ioctx.remove_object(header)
    ceph.rbd("trash", "mv", image_of(manager, trashed.id))
    ceph.rbd("rm", image_of(manager, gone.id))
    for each in (half, trashed, gone):
        manager.destroy(each.id)
    assert ceph.images() == [] and ceph.trash() == []


@pytest.mark.field("J4", "D3")
def test_what_others_have_in_the_pool_and_its_trash_is_left_alone(
    host: HostUnderTest, ceph: Ceph
) -> None:
    for name in ("theirs", "root.not-ours", f"root.{uuid.uuid4()}.0123456789ab"):
        ceph.rbd("create", f"vms/{name}", "--size", "1")
        ceph.rbd("create", f"vms/trash-{name}", "--size", "1")
        ceph.rbd("trash", "mv", f"vms/trash-{name}")
    images, trash = ceph.images(), ceph.trash()
    manager = host.manager()
    host.raw_image()
    instance = host.instance()
    manager.create(instance)
    listed = [each for each in manager.audit() if each.severity is Severity.OK]
    assert {
        name for name in images if any(name in each.subject for each in listed)
    } == (set(images))
    manager.destroy(instance.id)
    list(manager.recover(dry_run=False))
    assert (ceph.images(), ceph.trash()) == (images, trash)


# --- what somebody else did -----------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "renamed", "trashed"])
def test_an_image_of_ours_that_somebody_took_away_is_missed_by_name(
    made: Made, ceph: Ceph, how: str
) -> None:
    manager, instance = made.manager, made.instance
    disk = made.image
    {
        "removed": lambda: ceph.rbd("rm", disk),
        "renamed": lambda: ceph.rbd("mv", disk, "vms/other-name"),
        "trashed": lambda: ceph.rbd("trash", "mv", disk),
    }[how]()
    with pytest.raises(exc.ObjectMissing, match=disk) as caught:
        manager.connect(instance.id)
    assert ("rbd trash restore" in caught.value.message) == (how == "trashed")
    assert any("not in backend" in each.what for each in manager.audit())
    assert instance.flavor is not None
    larger = dataclasses.replace(instance.flavor, root_gb=2)
    with pytest.raises(exc.ObjectMissing, match=disk):
        manager.resize(dataclasses.replace(instance, flavor=larger))


def test_an_image_that_somebody_shrank_is_not_used_and_can_be_deleted(
    made: Made, ceph: Ceph
) -> None:
    manager, instance = made.manager, made.instance
    disk = made.image
    ceph.rbd("resize", disk, "--size", "10M", "--allow-shrink")
    damaged = rf"{disk} is damaged: it has {10 * MiB} bytes, recorded are {GiB}"
    with pytest.raises(exc.IntegrityError, match=damaged):
        manager.connect(instance.id)
    with pytest.raises(exc.IntegrityError, match=damaged):
        VERBS["resize"](manager, instance)
    assert any("is damaged" in each.what for each in manager.audit())
    manager.destroy(instance.id)
    assert ceph.images() == []


def test_a_pool_that_the_name_no_longer_leads_to_concerns_its_disks_alone(
    made: Made, ceph: Ceph, host: HostUnderTest
) -> None:
    manager, instance = made.manager, made.instance
    manager.close()
    row = f"ceph:{uuid.uuid4()}/vms"
    _sql(host, f"UPDATE generations SET scope = '{row}'")
    again = host.manager()
    with pytest.raises(exc.ConfigError, match=row):
        again.connect(instance.id)
    other = host.instance(imagebackend__backend="qcow2")
    again.create(other)
    again.destroy(other.id)


def _sql(host: HostUnderTest, statement: str) -> None:
    import sqlite3

    path = host.path / "store" / "imagebackend.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


# --- users, pools, room --------------------------------------------------------------


@pytest.mark.field("D10", "I9")
def test_two_backends_are_two_users_and_pools(host: HostUnderTest, ceph: Ceph) -> None:
    with open(host.conf.config_file[0], "a") as file:
        file.write(
            f"[second]\ndriver = rbd\nceph_conf = {ceph.conf}\n"
            f"user = imagebackend-rw\npools = vms2\n"
        )
    host.conf.reload_config_files()
    host.set("enabled_backends", ["rbd", "second"])
    host.raw_image()
    manager = host.manager()
    instance = host.instance(ephemeral_gb=1, imagebackend__ephemeral_backend="second")
    manager.create(instance)
    assert [name.split("/")[0] for name in ceph.images()] == ["vms", "vms2"]
    sources = [each.source for each in manager.connect(instance.id)]
    assert all(isinstance(each, NetworkSource) for each in sources)
    users = [each.user for each in sources if isinstance(each, NetworkSource)]
    secrets = {each.secret_uuid for each in sources if isinstance(each, NetworkSource)}
    assert users == ["imagebackend", "imagebackend-rw"] and len(secrets) == 2
    manager.disconnect(instance.id)


@pytest.fixture
def far() -> Iterator[Ceph]:
    """Another cluster."""
    # Not below the test's own folder: a socket's path must be short.
    folder = tempfile.mkdtemp(prefix="imagebackend-far-", dir="/var/tmp")
    testbed = [ROOT / "tools" / "testbed", "--folder", folder]
    subprocess.run([*testbed, "up", "ceph"], check=True)
    try:
        yield Ceph(f"{folder}/ceph/ceph.conf")
    finally:
        subprocess.run([*testbed, "down", "--wipe"], check=True)


@pytest.mark.field("I9")
def test_two_clusters_on_one_host_are_not_mixed_up(
    host: HostUnderTest, ceph: Ceph, far: Ceph, located: dict[str, str]
) -> None:
    with open(host.conf.config_file[0], "a") as file:
        file.write(far.section.replace("[rbd]", "[far]\ndriver = rbd"))
    host.conf.reload_config_files()
    host.set("enabled_backends", ["rbd", "far"])
    data = host.raw_image()
    located["raw-image"] = ceph.upload(host.images / "raw-image.raw", "images/base")
    manager = host.manager()
    near = host.instance(ephemeral_gb=1, imagebackend__ephemeral_backend="far")
    away = host.instance(imagebackend__backend="far")
    manager.create(near)
    manager.create(away)
    assert "parent" in ceph.info(image_of(manager, near.id))
    # The image is in the other cluster, so it comes by its bytes.
    copied = image_of(manager, away.id)
    assert copied in far.images() and far.content(copied, MiB) == data
    assert "parent" not in far.info(copied)
    assert len(ceph.images()) == 1 and len(far.images()) == 2
    sources = [each.source for each in manager.connect(near.id)]
    ports = [
        {each.port for each in source.hosts}
        for source in sources
        if isinstance(source, NetworkSource)
    ]
    secrets = {each.secret_uuid for each in sources if isinstance(each, NetworkSource)}
    assert len(ports) == 2 and not ports[0] & ports[1] and len(secrets) == 2
    wanted = {f"ceph:{each.fsid}/{pool}" for each in (ceph, far) for pool in POOLS}

    def told() -> set[str]:
        return {each.provider for each in manager.capacity() if each.what == "disks"}

    # A new cluster has no figures at first.
    _wait(lambda: told() == wanted, "both clusters tell their room")
    manager.disconnect(near.id)
    no_trouble(manager)
    for each in (near, away):
        manager.destroy(each.id)
    assert ceph.images() == [] and far.images() == []


@pytest.mark.field("D10")
def test_a_missing_cap_is_named(host: HostUnderTest, ceph: Ceph) -> None:
    option(host, "user", "readonly")
    option(host, "pools", "vms")
    manager = host.manager()
    host.raw_image()
    with pytest.raises(
        exc.ConfigError, match=r"client\.readonly needs the caps .*profile rbd pool=vms"
    ):
        manager.create(host.instance())
    assert ceph.images() == [] and list(manager.list()) == []
    (status,) = [each for each in manager.backends() if each.name == "rbd"]
    assert any("profile rbd pool=vms" in each.what for each in status.findings)


@pytest.mark.field("D13")
def test_a_user_that_may_not_cut_off_dead_clients_is_told_so(
    host: HostUnderTest, ceph: Ceph
) -> None:
    option(host, "user", "noblocklist")
    option(host, "pools", "vms")
    (status,) = [each for each in host.manager().backends() if each.name == "rbd"]
    (finding,) = [each for each in status.findings if each.severity is Severity.ERROR]
    assert "profile rbd" in finding.what and "host died" in finding.what


def test_a_user_that_there_is_not_is_a_matter_of_configuration(
    host: HostUnderTest, ceph: Ceph
) -> None:
    option(host, "user", "nobody")
    with pytest.raises(exc.ConfigError, match=r"client\.nobody"):
        host.manager().create(host.instance(image=None, root_gb=1))


def test_a_pool_that_there_is_not_is_named(host: HostUnderTest, ceph: Ceph) -> None:
    option(host, "pools", "nowhere")
    with pytest.raises(exc.ConfigError, match=r"no pool 'nowhere'.*\[rbd\] pools"):
        host.manager().create(host.instance(image=None, root_gb=1))


def test_a_flavor_chooses_among_the_pools(host: HostUnderTest, ceph: Ceph) -> None:
    host.raw_image()
    manager = host.manager()
    manager.create(host.instance(imagebackend__pool="vms2"))
    assert [name.split("/")[0] for name in ceph.images()] == ["vms2"]
    with pytest.raises(exc.PlacementRefused, match="vms, vms2"):
        manager.create(host.instance(imagebackend__pool="images"))


@pytest.mark.field("H1")
def test_a_full_pool_is_said_to_be_full_and_nothing_is_left(
    host: HostUnderTest, ceph: Ceph
) -> None:
    option(host, "operation_timeout", 5)
    host.raw_image(size=16 * MiB)
    manager = host.manager()
    kept = host.instance()
    manager.create(kept)
    ceph.ceph("osd", "pool", "set-quota", "vms", "max_bytes", str(4 * MiB))
    try:
        _wait(lambda: "full" in ceph.ceph("health", "detail"), "the pool fills up")
        with pytest.raises(exc.StorageFull, match=r"reached its quota|full"):
            manager.create(host.instance())
        # What makes room works.
        manager.close()
        list(manager.recover(dry_run=False))
        assert ceph.images() == [image_of(manager, kept.id)]
        manager.destroy(kept.id)
        assert ceph.images() == []
    finally:
        ceph.ceph("osd", "pool", "set-quota", "vms", "max_bytes", "0")
        _wait(lambda: "POOL_FULL" not in ceph.ceph("health", "detail"), "it empties")
    no_trouble(manager)


@pytest.mark.field("H1", "H2", "H5")
def test_capacity_is_the_clusters_and_counted_once(
    make_host: Callable[[str], HostUnderTest], ceph: Ceph
) -> None:
    told = []
    for name in ("one", "two"):
        host = make_host(name)
        host.enable_rbd(ceph)
        host.set("enabled_backends", ["rbd"])
        told.append(
            [each for each in host.manager().capacity() if each.what == "disks"]
        )
    assert [each.provider for each in told[0]] == [each.provider for each in told[1]]
    assert told[0][0].provider == f"ceph:{ceph.fsid}/vms"
    ceph.ceph("osd", "pool", "set-quota", "vms2", "max_bytes", str(GiB))
    try:
        pools = json.loads(ceph.ceph("df", "detail", "--format", "json"))["pools"]
        stats = {each["name"]: each["stats"] for each in pools}
        manager = host.manager()
        rooms = {each.provider.rpartition("/")[2]: each for each in manager.capacity()}
        assert rooms["vms2"].total <= GiB and rooms["vms2"].free <= GiB
        # What others write meanwhile is not ours to know.
        assert abs(rooms["vms"].free - stats["vms"]["max_avail"]) < GiB
        assert rooms["vms"].used_by_us is None
    finally:
        ceph.ceph("osd", "pool", "set-quota", "vms2", "max_bytes", "0")


# --- a cluster that does not answer -------------------------------------------------


@pytest.mark.field("D9")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "192.0.2.1:6789"])
def test_a_cluster_that_is_not_there_hinders_only_its_own_disks(
    host: HostUnderTest, tmp_path: Path, address: str
) -> None:
    conf = tmp_path / "ceph.conf"
    conf.write_text(f"[global]\nmon host = {address}\nkeyring = /dev/null\n")
    option(host, "ceph_conf", conf)
    option(host, "connect_timeout", 1)
    host.raw_image()
    manager = host.manager()
    since = time.monotonic()
    with pytest.raises(exc.ImageBackendError) as caught:
        manager.create(host.instance())
    assert time.monotonic() - since < 30
    assert "'rbd'" in caught.value.message
    other = host.instance(imagebackend__backend="qcow2")
    manager.create(other)
    assert [each.backend for each in manager.capacity() if each.what == "disks"] == [
        "qcow2"
    ]
    states = {each.name: each.findings for each in manager.backends()}
    assert any(each.severity is Severity.ERROR for each in states["rbd"])
    assert all(each.severity is Severity.OK for each in states["qcow2"])
    manager.destroy(other.id)


@contextmanager
def stopped(name: str) -> Iterator[Callable[[], None]]:
    """A daemon of the bed's Ceph hangs, until it is told to go on."""
    bed = Path(os.environ["IMAGEBACKEND_TESTBED"])
    pid = int((bed / "run" / f"{name}.pid").read_text().split()[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def _bed(ceph: Ceph) -> None:
    if "IMAGEBACKEND_TESTBED" not in os.environ:
        pytest.skip("needs the bed: only daemons of our own are stopped")


VERBS: dict[str, Callable[[DiskManager, Instance], object]] = {
    "create": lambda manager, instance: manager.create(
        dataclasses.replace(instance, id=str(uuid.uuid4()))
    ),
    "rebuild": lambda manager, instance: manager.rebuild(instance),
    "resize": lambda manager, instance: manager.resize(_larger(instance)),
    "destroy": lambda manager, instance: manager.destroy(instance.id),
}


def _larger(instance: Instance) -> Instance:
    assert instance.flavor is not None
    flavor = dataclasses.replace(instance.flavor, root_gb=2)
    return dataclasses.replace(instance, flavor=flavor)


@pytest.mark.field("D9")
@pytest.mark.usefixtures("_bed")
@pytest.mark.parametrize("verb", VERBS)
def test_an_osd_that_stops_in_a_verb_ends_it_in_time_and_it_is_settled_later(
    host: HostUnderTest, ceph: Ceph, verb: str, made: Made
) -> None:
    option(host, "operation_timeout", 2)
    manager, instance = made.manager, made.instance
    manager.close()  # the next connection has the new option
    with stopped("ceph-osd") as go_on:
        with pytest.raises(exc.StorageUnavailable, match="OSDs up"):
            VERBS[verb](manager, instance)
        go_on()
        _wait(lambda: bool(ceph.images("images") is not None), "the OSD answers")
        manager.close()
        again = host.manager()
        _wait(
            lambda: (
                not list(again.recover(dry_run=False))
                and not list(again.recover(dry_run=True))
            ),
            "recovery settles it",
        )
    if verb == "destroy":
        again.destroy(instance.id)
        assert ceph.images() == []
    else:
        assert ceph.images() == [image_of(again, instance.id)]
    assert ceph.trash() == []
    no_trouble(again)


@pytest.mark.field("D9")
@pytest.mark.usefixtures("_bed")
def test_a_copy_from_an_osd_that_stopped_ends_in_time(
    host: HostUnderTest, ceph: Ceph, made: Made
) -> None:
    option(host, "operation_timeout", 2)
    made.manager.close()
    (connection,) = made.manager.connect(made.instance.id)
    target = host.path / "copy"
    with (
        stopped("ceph-osd"),
        pytest.raises(exc.StorageUnavailable, match="does not answer"),
    ):
        QemuImg(host.conf).convert_to_file(connection.source, str(target), "raw")
    made.manager.disconnect(made.instance.id)
    QemuImg(host.conf).convert_to_file(connection.source, str(target), "raw")
    assert target.stat().st_size == GiB


@pytest.mark.usefixtures("_bed")
def test_the_connection_is_made_anew_after_the_monitors_were_away(
    host: HostUnderTest, ceph: Ceph
) -> None:
    option(host, "operation_timeout", 2)
    option(host, "connect_timeout", 2)
    manager = host.manager()
    first = host.instance(image=None)
    manager.create(first)
    with (
        stopped("ceph-mon"),
        stopped("ceph-osd"),
        pytest.raises(exc.StorageUnavailable),
    ):
        manager.create(host.instance(image=None))
    _wait(lambda: not list(manager.recover(dry_run=False)), "recovery settles it")
    manager.create(host.instance(image=None))
    assert len(ceph.images()) == 2
    no_trouble(manager)


def _wait(done: Callable[[], bool], what: str, limit: float = 60) -> None:
    end = time.monotonic() + limit
    while True:
        try:
            if done():
                return
        except (AssertionError, exc.StorageError):
            pass
        assert time.monotonic() < end, what
        time.sleep(0.2)


# --- many, secrets ------------------------------------------------------------------


def test_many_threads_make_many_disks_on_one_connection(
    host: HostUnderTest, ceph: Ceph, located: dict[str, str]
) -> None:
    host.raw_image()
    located["raw-image"] = ceph.upload(host.images / "raw-image.raw", "images/base")
    manager = host.manager()
    errors: list[BaseException] = []
    instances = [host.instance() for _ in range(40)]
    queue = list(instances)

    def work() -> None:
        while queue:
            try:
                manager.create(queue.pop())
            except IndexError:
                return
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert len(ceph.images()) == 40
    no_trouble(manager)


def _backend(host: HostUnderTest) -> Backend:
    """The driver alone."""
    from imagebackend.backends.loader import Backends

    return Backends(host.conf, lambda: "0123456789ab").get("rbd")


class _Here(Harness):
    def __init__(self, host: HostUnderTest, backend: Backend) -> None:
        super().__init__(str(host.path))
        self._backend = backend

    def backend(self, deployment_id: str = "") -> Backend:
        return self._backend


@pytest.mark.field("D13")
@pytest.mark.parametrize("alive", [True, False], ids=["alive", "hung"])
def test_an_image_that_another_client_has_locked_is_grown_and_kept_whole(
    host: HostUnderTest, ceph: Ceph, alive: bool
) -> None:
    """The owner of the lock grows it for us; one that hangs is cut off first."""
    from imagebackend.testing import harness as h

    backend = _backend(host)
    disk = h.make(_Here(host, backend), backend)
    image = f"{disk.handle['pool']}/{disk.handle['image']}"
    locked = "i.lock_acquire(rbd.RBD_LOCK_MODE_EXCLUSIVE)"
    with client(ceph, image, locked) as process:
        if not alive:
            process.send_signal(signal.SIGSTOP)
        assert backend.resize(disk, 2 * GiB) == 2 * GiB
        assert ceph.info(image)["size"] == 2 * GiB
        if not alive:
            process.kill()
    assert ceph.content(image, 1) == b"x"


@pytest.mark.field("D4", "D5")
def test_rounds_of_snapshots_leave_nothing_behind(
    host: HostUnderTest, ceph: Ceph
) -> None:
    from imagebackend.backends.base import FromSnapshot
    from imagebackend.testing import harness as h

    backend = _backend(host)
    harness = _Here(host, backend)
    disk = h.make(harness, backend)
    for number in range(6):
        snap = backend.snapshot(disk, f"round-{number}", h.Recorder())
        clone = h.make(harness, backend, FromSnapshot(disk, snap))
        backend.delete_snapshot(disk, snap)
        backend.delete(clone)
    name = f"{disk.handle['pool']}/{disk.handle['image']}"
    assert json.loads(ceph.rbd("snap", "ls", "--all", name, "--format", "json")) == []
    assert ceph.images() == [name] and ceph.trash() == []


@pytest.mark.field("D16")
def test_no_key_is_in_the_store_a_log_or_a_command_line(
    host: HostUnderTest, ceph: Ceph, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    keyring = Path(ceph.conf).parent / "ceph.client.imagebackend.keyring"
    (key,) = (
        line.split("=", 1)[1].strip()
        for line in keyring.read_text().splitlines()
        if line.strip().startswith("key")
    )
    seen: list[str] = []
    popen = subprocess.Popen.__init__

    def watching(self: object, args: object, *rest: object, **more: object) -> None:
        seen.append(str(args) + str(more.get("env")))
        popen(self, args, *rest, **more)  # type: ignore[arg-type, call-overload]

    subprocess.Popen.__init__ = watching  # type: ignore[method-assign, assignment]
    try:
        host.raw_image()
        manager = host.manager()
        instance = host.instance()
        manager.create(instance)
        manager.connect(instance.id)
        manager.close()
    finally:
        subprocess.Popen.__init__ = popen  # type: ignore[method-assign]
    assert seen and not any(key in each for each in seen)
    assert key not in caplog.text
    for path in (host.path / "store").iterdir():
        assert key.encode() not in path.read_bytes()


@pytest.mark.field("D8")
def test_monitors_are_asked_for_each_time(host: HostUnderTest, ceph: Ceph) -> None:
    manager = host.manager()
    instance = host.instance(image=None)
    manager.create(instance)
    dump = json.loads(ceph.ceph("mon", "dump", "--format", "json"))
    there = {
        each["addr"]
        for monitor in dump["mons"]
        for each in monitor["public_addrs"]["addrvec"]
    }
    (connection,) = manager.connect(instance.id)
    assert isinstance(connection.source, NetworkSource)
    hosts = connection.source.hosts
    assert {f"{each.name}:{each.port}" for each in hosts} == there and len(there) == 2
    assert "mon" not in json.dumps(manager.export_rows(instance.id)["attachments"])
    manager.disconnect(instance.id)


@pytest.mark.field("I12")
def test_without_the_bindings_only_this_backend_fails(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['rados'] = None\n"
        "from imagebackend.cli.app import main\n"
        "sys.exit(main(['--config-file', sys.argv[1], 'backend', 'list']))\n"
    )
    conf = tmp_path / "conf"
    conf.write_text(
        f"[imagebackend]\nstate_path = {tmp_path}\nenabled_backends = qcow2, rbd\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(conf)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split("|")[1].strip(): line for line in done.stdout.splitlines()[3:-1]}
    assert "ok" in rows["qcow2"]
    assert "error" in rows["rbd"] and "python3-rados" in done.stdout
