# SPDX-License-Identifier: Apache-2.0
"""Images of a real Glance: read by whom it may, cloned, downloaded whole or not at
all; snapshots that are images or leave nothing."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from imagebackend import DiskManager, UploadTarget
from imagebackend import exceptions as exc
from imagebackend.images.glance import GlanceSource
from imagebackend.model import GiB, MiB, Severity
from imagebackend.model import Path as Way
from tests.ceph import Ceph
from tests.cloud import Cloud, User, wait
from tests.conftest import HostUnderTest

pytestmark = pytest.mark.timeout(300)


class Images:
    """Images of one test, removed after it."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str]] = []

    def upload(
        self,
        user: User | Any,
        data: bytes = b"",
        *,
        disk_format: str = "raw",
        store: str = "",
        **facts: Any,
    ) -> str:
        """By Glance's API alone; ``data`` empty: it stays queued."""
        connection = user.connection if isinstance(user, User) else user
        client = connection.image
        body = {
            "name": "test",
            "disk_format": disk_format,
            "container_format": "bare",
            "visibility": "private",
            **facts,
        }
        answer = client.post("/images", json=body)
        assert answer.status_code == 201, answer.text
        image_id: str = answer.json()["id"]
        self._made.append((connection, image_id))
        if data:
            headers = {"Content-Type": "application/octet-stream"}
            if store:
                headers["X-Image-Meta-Store"] = store
            answer = client.put(f"/images/{image_id}/file", data=data, headers=headers)
            assert answer.status_code == 204, answer.text
        return image_id

    def expect(self, connection: Any, image_id: str) -> str:
        """One that the library is going to make."""
        self._made.append((connection, image_id))
        return image_id

    def remove(self) -> None:
        for connection, image_id in self._made:
            connection.image.patch(
                f"/images/{image_id}",
                json=[{"op": "replace", "path": "/protected", "value": False}],
                headers={
                    "Content-Type": "application/openstack-images-v2.1-json-patch"
                },
            )
            connection.image.delete(f"/images/{image_id}")


@pytest.fixture
def images() -> Iterator[Images]:
    made = Images()
    yield made
    made.remove()


@pytest.fixture
def host(
    host: HostUnderTest, cloud: Cloud, ceph: Ceph, images: Images
) -> HostUnderTest:
    """Images come from Glance; disks go to Ceph, or to qcow2."""
    with open(host.conf.config_file[0], "a") as file:
        file.write("[imagebackend_images]\nsource = glance\n")
        file.write(cloud.section("imagebackend_glance"))
    host.enable_rbd(ceph)
    host.set("enabled_backends", ["rbd", "qcow2"])
    return host


def option(host: HostUnderTest, name: str, value: object) -> None:
    """Of Glance's group, in the file, as an operator sets it."""
    path = Path(host.conf.config_file[0])
    header = "[imagebackend_glance]\n"
    path.write_text(path.read_text().replace(header, f"{header}{name} = {value}\n"))
    host.conf.reload_config_files()


def described(cloud: Cloud, image_id: str) -> dict[str, Any] | None:
    answer = cloud.admin.image.get(f"/images/{image_id}")
    if answer.status_code == 404:
        return None
    facts: dict[str, Any] = answer.json()
    return facts


def place(manager: DiskManager, instance_id: str) -> str:
    (root,) = [each for each in manager.list(instance_id) if each.name == "root"]
    return f"{root.handle['pool']}/{root.handle['image']}"


def no_trouble(manager: DiskManager) -> None:
    assert [each for each in manager.audit() if each.severity is not Severity.OK] == []
    assert list(manager.recover(dry_run=True)) == []


# --- reading --------------------------------------------------------------------


@pytest.mark.parametrize("as_caller", [True, False], ids=["caller", "service"])
def test_a_private_raw_image_is_cloned_for_its_project(
    host: HostUnderTest, cloud: Cloud, images: Images, ceph: Ceph, as_caller: bool
) -> None:
    data = os.urandom(2 * MiB)
    image = images.upload(cloud.member, data)
    auth = cloud.member.auth if as_caller else None
    instance = host.instance(image, project_id=cloud.member.project_id)
    manager = host.manager()
    (planned,) = manager.plan(instance, auth=auth).disks
    assert planned.placement.path is Way.CLONE
    manager.create(instance, auth=auth)
    disk = place(manager, instance.id)
    assert ceph.info(disk)["parent"]["image"] == image
    assert ceph.content(disk, 3 * MiB) == data + bytes(MiB)
    assert not (host.path / "cache").exists()
    manager.rebuild(instance, auth=auth)
    no_trouble(manager)


@pytest.mark.parametrize("as_caller", [True, False], ids=["caller", "service"])
def test_a_private_image_of_another_project_is_not_found(
    host: HostUnderTest, cloud: Cloud, images: Images, ceph: Ceph, as_caller: bool
) -> None:
    image = images.upload(cloud.member, os.urandom(MiB))
    auth = cloud.other.auth if as_caller else None
    instance = host.instance(image, project_id=cloud.other.project_id)
    manager = host.manager()
    with pytest.raises(exc.ImageNotFound, match=image):
        manager.create(instance, auth=auth)
    assert ceph.images() == [] and list(manager.list()) == []


def test_a_shared_image_is_found_by_its_members(
    host: HostUnderTest, cloud: Cloud, images: Images, ceph: Ceph
) -> None:
    image = images.upload(cloud.member, os.urandom(MiB), visibility="shared")
    instance = host.instance(image, project_id=cloud.other.project_id)
    manager = host.manager()
    with pytest.raises(exc.ImageNotFound):
        manager.create(instance)
    cloud.member.connection.image.post(
        f"/images/{image}/members", json={"member": cloud.other.project_id}
    )
    manager.create(instance)
    assert len(ceph.images()) == 1


def test_public_and_protected_images_are_everybodys(
    host: HostUnderTest, cloud: Cloud, images: Images, ceph: Ceph
) -> None:
    data = os.urandom(MiB)
    image = images.upload(cloud.admin, data, visibility="public", protected=True)
    manager = host.manager()
    instance = host.instance(image, project_id=cloud.other.project_id)
    manager.create(instance, auth=cloud.other.auth)
    assert ceph.content(place(manager, instance.id), MiB) == data


def test_a_deactivated_or_queued_image_is_refused_though_the_service_could_read_it(
    host: HostUnderTest, cloud: Cloud, images: Images, ceph: Ceph
) -> None:
    image = images.upload(cloud.member, os.urandom(MiB))
    cloud.admin.image.post(f"/images/{image}/actions/deactivate")
    queued = images.upload(cloud.member)
    manager = host.manager()
    for each, state in ((image, "deactivated"), (queued, "queued")):
        instance = host.instance(each, project_id=cloud.member.project_id)
        with pytest.raises(exc.ImageRejected, match=state):
            manager.create(instance)
    assert ceph.images() == []


@pytest.mark.field("E12")
def test_an_image_that_only_points_to_volume_snapshots_is_refused(
    host: HostUnderTest, cloud: Cloud, images: Images
) -> None:
    mapping = '[{"source_type": "snapshot", "snapshot_id": "x", "boot_index": 0}]'
    image = images.upload(cloud.member, block_device_mapping=mapping)
    # As Nova makes them: active, without data.
    path = f"/images/{image}/file"
    cloud.member.connection.image.put(
        path, data=b"", headers={"Content-Type": "application/octet-stream"}
    )
    instance = host.instance(image, project_id=cloud.member.project_id)
    with pytest.raises(exc.ImageRejected, match="block_device_mapping"):
        host.manager().create(instance)


def test_an_id_that_is_none_or_unknown_is_said_to_be_so(host: HostUnderTest) -> None:
    manager = host.manager()
    with pytest.raises(exc.InvalidValue, match="uuid"):
        manager.create(host.instance("debian"))
    with pytest.raises(exc.ImageNotFound):
        manager.create(host.instance(str(uuid.uuid4())))


@pytest.mark.field("A11")
def test_a_qcow2_image_is_downloaded_checked_and_converted(
    host: HostUnderTest, cloud: Cloud, images: Images, ceph: Ceph, tmp_path: Path
) -> None:
    data = host.qcow2_image()
    bytes_ = (host.images / "qcow2-image.qcow2").read_bytes()
    image = images.upload(cloud.member, bytes_, disk_format="qcow2")
    manager = host.manager()
    on_ceph = host.instance(image, project_id=cloud.member.project_id)
    manager.create(on_ceph, auth=cloud.member.auth)
    assert ceph.content(place(manager, on_ceph.id), 8 * MiB) == data
    local = host.instance(
        image, project_id=cloud.member.project_id, imagebackend__backend="qcow2"
    )
    manager.create(local)
    (entry,) = manager.cache_entries()
    assert entry.image_id == image and not entry.broken
    no_trouble(manager)


@pytest.mark.field("D12")
def test_an_image_in_another_store_is_copied_refused_or_brought_by_glance(
    host: HostUnderTest, cloud: Cloud, images: Images, ceph: Ceph
) -> None:
    if "OS_CLOUD" in os.environ:
        pytest.skip("needs the bed: its stores")
    data = os.urandom(MiB)
    image = images.upload(cloud.member, data, store="file")
    instance = host.instance(image, project_id=cloud.member.project_id)
    manager = host.manager()
    (planned,) = manager.plan(instance).disks
    assert planned.placement.path is Way.COPY
    manager.create(instance)
    assert "parent" not in ceph.info(place(manager, instance.id))
    host.set("slow_path", "refuse")
    second = host.instance(image, project_id=cloud.member.project_id)
    with pytest.raises(exc.PlacementRefused, match="slow_path"):
        manager.create(second)
    option(host, "copy_to_store", "rbd")
    with pytest.raises(exc.PlacementRefused):
        manager.plan(second)  # no effect, so it tells how things are
    manager.create(second)
    disk = place(manager, second.id)
    assert ceph.info(disk)["parent"]["image"] == image
    assert ceph.content(disk, MiB) == data
    facts = described(cloud, image)
    assert facts is not None and set(facts["stores"].split(",")) == {"file", "rbd"}


# --- a network that breaks --------------------------------------------------------


@contextmanager
def proxy(
    target: str, spoil: Callable[[int, bytes], bytes | None]
) -> Iterator[tuple[str, list[int]]]:
    """Passes on what comes from ``target``; ``spoil`` gets the number of the download
    and each piece of its answer: None cuts the connection."""
    host, _, port = target.partition(":")
    number = [0]
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as server:
            head = b""
            while b"\r\n\r\n" not in head:
                piece = client.recv(65536)
                if not piece:
                    return
                head += piece
            mine = 0
            if b"/file HTTP" in head.partition(b"\r\n")[0]:
                number[0] += 1
                mine = number[0]
            here = f"127.0.0.1:{listener.getsockname()[1]}".encode()
            head = head.replace(here, f"{host}:{port}".encode())
            server.sendall(
                head.replace(b"Connection: keep-alive", b"Connection: close")
            )
            while piece := server.recv(65536):
                if mine:
                    spoiled = spoil(mine, piece)
                    if spoiled is None:
                        return
                    piece = spoiled
                client.sendall(piece)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", number
    finally:
        listener.close()


@pytest.mark.field("A12")
@pytest.mark.parametrize("fault", ["cut", "flipped"])
@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_a_torn_or_spoiled_download_is_tried_again_and_never_a_disk(
    host: HostUnderTest,
    cloud: Cloud,
    images: Images,
    ceph: Ceph,
    fault: str,
    always: bool,
) -> None:
    data = os.urandom(4 * MiB)
    image = images.upload(cloud.member, data)
    endpoint = urllib.parse.urlsplit(cloud.admin.image.get_endpoint()).netloc
    sent: dict[int, int] = {}

    def spoil(number: int, piece: bytes) -> bytes | None:
        sent[number] = sent.get(number, 0) + len(piece)
        if (number > 1 and not always) or sent[number] < 2 * MiB:
            return piece
        return None if fault == "cut" else bytes([piece[0] ^ 1]) + piece[1:]

    with proxy(endpoint, spoil) as (address, number):
        option(host, "endpoint_override", address)
        host.set("num_retries", 2, "imagebackend_images")
        instance = host.instance(
            image, project_id=cloud.member.project_id, imagebackend__backend="qcow2"
        )
        manager = host.manager()
        if always:
            with pytest.raises((exc.IntegrityError, exc.StorageUnavailable)):
                manager.create(instance)
            assert number[0] == 3
            assert host.files() == [] and list(manager.list()) == []
            assert manager.cache_entries() == []
        else:
            manager.create(instance)
            assert number[0] == 2
            (entry,) = manager.cache_entries()
            base = host.path / "cache" / entry.entry / "base.raw"
            assert base.read_bytes() == data


def test_a_glance_that_is_not_there_is_said_to_be_so(
    host: HostUnderTest, cloud: Cloud
) -> None:
    option(host, "endpoint_override", "http://127.0.0.1:1")
    option(host, "connect_retries", 0)
    manager = host.manager()
    with pytest.raises(exc.StorageUnavailable, match="Glance"):
        manager.create(host.instance(str(uuid.uuid4())))
    errors = [each for each in manager.check() if each.severity is Severity.ERROR]
    assert any("Glance" in each.what for each in errors)


def test_a_login_that_is_wrong_or_missing_names_its_group(
    host: HostUnderTest, cloud: Cloud
) -> None:
    text = Path(host.conf.config_file[0]).read_text()
    password = cloud.service.options["password"]
    Path(host.conf.config_file[0]).write_text(text.replace(password, "wrong"))
    host.conf.reload_config_files()
    with pytest.raises(exc.ConfigError, match="imagebackend_glance") as caught:
        host.manager().create(host.instance(str(uuid.uuid4())))
    assert "wrong" not in caught.value.message
    Path(host.conf.config_file[0]).write_text(
        text.replace("auth_type = password\n", "")
    )
    host.conf.reload_config_files()
    with pytest.raises(exc.ConfigError, match="auth_type is not set"):
        host.manager().create(host.instance(str(uuid.uuid4())))


# --- snapshots ---------------------------------------------------------------------


@pytest.fixture
def made(
    host: HostUnderTest, cloud: Cloud, images: Images
) -> tuple[DiskManager, str, bytes]:
    """A manager, an instance of it, and what its root disk begins with."""
    data = os.urandom(2 * MiB)
    image = images.upload(cloud.member, data)
    instance = host.instance(image, project_id=cloud.member.project_id)
    manager = host.manager()
    manager.create(instance)
    return manager, instance.id, data


@pytest.mark.parametrize("way", ["made here", "made by the caller"])
@pytest.mark.parametrize("disk_format", ["raw", "qcow2"])
def test_a_snapshot_is_an_image_of_the_instances_project(
    made: tuple[DiskManager, str, bytes],
    cloud: Cloud,
    images: Images,
    way: str,
    disk_format: str,
) -> None:
    manager, instance_id, data = made
    if way == "made here":
        target = images.expect(cloud.admin, str(uuid.uuid4()))
    else:
        target = images.upload(cloud.member, disk_format=disk_format, name="mine")
    info = manager.snapshot(
        instance_id, UploadTarget(target, disk_format, name="nightly")
    )
    facts = described(cloud, target)
    assert facts is not None
    assert facts["status"] == "active" and facts["disk_format"] == disk_format
    assert facts["owner"] == cloud.member.project_id
    assert facts["name"] == ("nightly" if way == "made here" else "mine")
    assert facts["image_type"] == "snapshot"
    assert facts["instance_uuid"] == instance_id and facts["base_image_ref"]
    assert facts["min_disk"] == 1
    assert not [key for key in facts if key.startswith("imagebackend")]
    assert info.id == target and info.digest == f"sha512:{facts['os_hash_value']}"
    answer = cloud.member.connection.image.get(f"/images/{target}/file")
    assert hashlib.sha512(answer.content).hexdigest() == facts["os_hash_value"]
    if disk_format == "raw":
        assert answer.content[: 2 * MiB] == data and len(answer.content) == GiB
    no_trouble(manager)


@pytest.mark.field("D14", "F12")
def test_a_raw_snapshot_goes_straight_into_glances_pool_if_the_user_may(
    host: HostUnderTest,
    made: tuple[DiskManager, str, bytes],
    cloud: Cloud,
    images: Images,
    ceph: Ceph,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager, instance_id, data = made
    text = Path(host.conf.config_file[0]).read_text()
    text = text.replace("[rbd]\n", "[rbd]\nimage_pool = images\n")
    Path(host.conf.config_file[0]).write_text(text)
    host.conf.reload_config_files()
    # The user may only read there: uploaded, with a word in the log.
    first = images.expect(cloud.admin, str(uuid.uuid4()))
    manager.snapshot(instance_id, UploadTarget(first, "raw"))
    assert "uploaded instead" in caplog.text
    assert "profile rbd pool=images" in caplog.text
    (status,) = [each for each in manager.backends() if each.name == "rbd"]
    (finding,) = [each for each in status.findings if each.severity is not Severity.OK]
    assert finding.severity is Severity.WARNING
    assert "profile rbd pool=images" in finding.what
    Path(host.conf.config_file[0]).write_text(
        text.replace("user = imagebackend\n", "user = imagebackend-rw\n")
    )
    host.conf.reload_config_files()
    manager.close()
    manager = host.manager()
    caplog.clear()
    second = images.expect(cloud.admin, str(uuid.uuid4()))
    manager.snapshot(instance_id, UploadTarget(second, "raw"))
    assert "instead" not in caplog.text
    facts = described(cloud, second)
    assert facts is not None and facts["status"] == "active"
    assert facts["size"] == GiB and facts["owner"] == cloud.member.project_id
    assert not [key for key in facts if key.startswith("imagebackend")]
    assert "parent" not in ceph.info(f"images/{second}")
    assert ceph.content(f"images/{second}", 2 * MiB) == data
    # A disk is cloned from it, and both can go in any order.
    copy = host.instance(second, project_id=cloud.member.project_id)
    manager.create(copy)
    assert ceph.info(place(manager, copy.id))["parent"]["image"] == second
    manager.destroy(instance_id)
    manager.destroy(copy.id)
    assert ceph.images() == [] and ceph.trash() == []
    assert cloud.admin.image.delete(f"/images/{second}").status_code == 204
    assert f"images/{second}" not in ceph.images("images")


def test_a_target_with_data_is_refused_before_any_work(
    made: tuple[DiskManager, str, bytes], cloud: Cloud, images: Images
) -> None:
    manager, instance_id, _ = made
    taken = images.upload(cloud.member, os.urandom(MiB))
    with pytest.raises(exc.Conflict, match="active"):
        manager.snapshot(instance_id, UploadTarget(taken, "raw"))
    declared = images.upload(cloud.member, disk_format="vmdk")
    with pytest.raises(exc.Conflict, match="vmdk"):
        manager.snapshot(instance_id, UploadTarget(declared, "raw"))
    with pytest.raises(exc.InvalidValue, match="uuid"):
        manager.snapshot(instance_id, UploadTarget("nightly", "raw"))
    facts = described(cloud, declared)
    assert facts is not None and facts["status"] == "queued"
    assert not [key for key in facts if key.startswith("imagebackend")]
    no_trouble(manager)


@pytest.mark.field("F8")
@pytest.mark.parametrize("way", ["made here", "made by the caller"])
def test_a_snapshot_that_fails_or_dies_leaves_no_image_behind(
    host: HostUnderTest,
    made: tuple[DiskManager, str, bytes],
    cloud: Cloud,
    images: Images,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    manager, instance_id, _ = made

    def target() -> str:
        if way == "made here":
            return images.expect(cloud.admin, str(uuid.uuid4()))
        return images.upload(cloud.member, disk_format="qcow2")

    def as_before(image_id: str) -> bool:
        facts = described(cloud, image_id)
        if way == "made here":
            return facts is None
        assert facts is not None
        marks = [key for key in facts if key.startswith("imagebackend")]
        return facts["status"] == "queued" and not marks

    def fail(progress: object) -> None:
        if getattr(progress, "what", "") == "upload image":
            raise KeyboardInterrupt

    failing = target()
    with pytest.raises(KeyboardInterrupt):
        manager.snapshot(instance_id, UploadTarget(failing), progress=fail)
    wait(lambda: as_before(failing), "the image is as before")
    no_trouble(manager)

    dying = target()
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(GlanceSource, "discard", lambda *_: os._exit(9))
        try:
            host.manager().snapshot(
                instance_id,
                UploadTarget(dying),
                progress=lambda told: (
                    os._exit(9) if told.what == "upload image" else None
                ),
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    manager.close()
    again = host.manager()
    wait(
        lambda: not list(again.recover(dry_run=False)) and as_before(dying),
        "recovery leaves the image as it was",
    )
    no_trouble(again)
