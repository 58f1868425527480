# SPDX-License-Identifier: Apache-2.0
"""Volume types of a real Cinder that are encrypted, or limit what a guest may do."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from imagebackend import DiskManager, DiskSpec, Lifecycle, UploadTarget, processes
from imagebackend import exceptions as exc
from imagebackend.backends.luks import secret_uuid
from imagebackend.libvirt.connection import connect
from imagebackend.libvirt.guest import Guest
from imagebackend.model import Connection, FileSource
from imagebackend.model import Path as Way
from imagebackend.qemu_img import image_opts
from tests.cinder import MOUNTS, CinderUnderTest
from tests.conftest import GiB, HostUnderTest, MiB, read_disk
from tests.functional import test_cinder
from tests.functional.test_cinder import agree, of, option
from tests.functional.test_glance import Images
from tests.functional.test_guest import larger, nothing_wrong, running, sizes
from tests.key_manager import PASSPHRASE

pytestmark = pytest.mark.timeout(600)

guest_image, images = test_cinder.guest_image, test_cinder.images
manager = test_cinder.manager
_cinder_host = test_cinder.host
#: These take long: each is tried on one of the two kinds, unless all are asked for.
EVERY = "IMAGEBACKEND_CINDER_EVERY" in os.environ


def on(kind: str) -> pytest.MarkDecorator:
    kinds = ("rbd1", "nfs1") if EVERY else (kind,)
    return pytest.mark.parametrize(
        "backend",
        [pytest.param(each, marks=MOUNTS if each == "nfs1" else ()) for each in kinds],
    )


@pytest.fixture
def host(_cinder_host: HostUnderTest) -> HostUnderTest:
    """Its key manager has the key of the cloud's Cinder."""
    keys(_cinder_host, "FixedKey")
    return _cinder_host


def keys(host: HostUnderTest, name: str) -> None:
    with open(host.conf.config_file[0], "a") as file:
        file.write(f"[key_manager]\nbackend = tests.key_manager.{name}\n")
    host.conf.reload_config_files()


@contextmanager
def encrypted(
    cinder: CinderUnderTest, backend: str, provider: str = "luks"
) -> Iterator[str]:
    """An encrypted volume type."""
    with cinder.type_of(backend) as name:
        listed = cinder.get("/types")["volume_types"]
        (type_id,) = [each["id"] for each in listed if each["name"] == name]
        body = {
            "provider": provider,
            "cipher": "aes-xts-plain64",
            "key_size": 256,
            "control_location": "front-end",
        }
        answer = cinder.cloud.admin.block_storage.post(
            f"/types/{type_id}/encryption", json={"encryption": body}
        )
        assert answer.status_code == 200, answer.text
        yield name


def at_rest(cinder: CinderUnderTest, volume_id: str, backend: str, *texts: str) -> str:
    """Which of the texts the storage has in a volume, told by its own tools."""
    if backend.startswith("nfs"):
        folder = os.environ["IMAGEBACKEND_TESTBED"]
        read = f"cat {folder}/cinder/{backend}/volume-{volume_id}"
    else:
        name = f"volumes/volume-{volume_id}"
        read = f"rbd -c {cinder.conf} export --no-progress {name} -"
    # Between zeros, which most of it is.
    find = f"LC_ALL=C grep -zaoE '{'|'.join(texts)}' | sort -zu | tr '\\0' ' '"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {read} | {find}"],
        capture_output=True,
        text=True,
    )
    assert not done.stderr
    return done.stdout.strip()


def decrypted(connection: Connection, offset: int, length: int) -> bytes:
    """What a guest would read, told by QEMU alone."""
    opts = image_opts(connection.source)
    if connection.source.format == "raw":
        opts = "driver=luks,key-secret=s," + opts.partition(",")[2]
    else:
        opts += ",encrypt.format=luks,encrypt.key-secret=s"
    target = Path("/var/tmp") / f"read-{uuid.uuid4()}"
    first, last = offset // MiB, (offset + length) // MiB
    subprocess.run(
        [
            *("qemu-img", "dd", "-U", "--object", f"secret,id=s,data={PASSPHRASE}"),
            *("--image-opts", f"bs={MiB}", f"skip={first}", f"count={last}"),
            *(f"if={opts}", f"of={target}"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    data = target.read_bytes()
    target.unlink()
    return data


def libvirt_has_key(host: HostUnderTest, volume_id: str) -> bool:
    found = connect(host.conf).listAllSecrets()
    return secret_uuid(volume_id) in [each.UUIDString() for each in found]


@on("rbd1")
def test_a_guest_boots_from_an_encrypted_type_and_its_disk_grows_and_is_rebuilt(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    guest_image: str,
    backend: str,
) -> None:
    network = backend.startswith("rbd")
    with encrypted(cinder, backend) as volume_type:
        instance = host.instance(guest_image, imagebackend__volume_type=volume_type)
        (planned,) = manager.plan(instance).disks
        assert planned.placement.path is (Way.CLONE if network else Way.COPY)
        manager.create(instance)
        agree(host, manager)
        volume = of(cinder, manager, instance.id)
        assert volume["encrypted"] and volume["size"] == planned.size // GiB == 2
        with running(manager, instance) as guest:
            assert guest.report().boot == 1
            before = sizes(guest)["vda"]
            assert GiB <= before <= 2 * GiB
            guest.command("write vda 200 2 IN-PLAIN-TEXT")
            wanted = guest.command("sum vda 200 2")
            assert libvirt_has_key(host, volume["id"])
            layer = ET.fromstring(guest.xml()).find("./devices/disk/source/encryption")
            assert layer is not None and layer.get("format") == "luks"
            live = Guest.lookup(host.conf, instance.id)
            if network:
                manager.resize(larger(instance, 2), live)
                assert 2 * GiB < sizes(guest)["vda"] < 3 * GiB
                end = sizes(guest)["vda"] // MiB - 1
                assert guest.command(f"write vda {end} 1 far") == "write"
            else:
                with pytest.raises(exc.NotSupported, match="stop the guest first"):
                    manager.resize(larger(instance, 2), live)
            assert guest.command("sum vda 200 2") == wanted
            agree(host, manager)
            guest.poweroff()
        assert not libvirt_has_key(host, volume["id"])
        found = at_rest(cinder, volume["id"], backend, "LUKS", "IN-PLAIN-TEXT")
        assert found == "LUKS"
        if not network:
            manager.resize(larger(instance, 2))
        agree(host, manager)
        assert of(cinder, manager, instance.id)["size"] == 3
        with running(manager, instance) as guest:
            assert guest.report().boot == 2
            assert 2 * GiB <= sizes(guest)["vda"] < 3 * GiB
            assert guest.command("sum vda 200 2") == wanted
            guest.poweroff()
        manager.rebuild(larger(instance, 2))
        agree(host, manager)
        with running(manager, instance) as guest:
            assert guest.report().boot == 1
            assert guest.command("sum vda 200 2") != wanted
            guest.poweroff()
        manager.destroy(instance.id)
        assert cinder.volumes() == [] and cinder.attachments() == []


@on("nfs1")
def test_what_this_host_writes_and_reads_is_encrypted_too(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    started: list[str] = []
    run = processes.run

    def watched(argv: Any, **kwargs: Any) -> Any:
        started.extend(argv)
        return run(argv, **kwargs)

    monkeypatch.setattr(processes, "run", watched)
    content = host.path / "content"
    content.write_bytes(bytes(MiB) + os.urandom(MiB - 9) + b"IN-PLAIN-")
    with encrypted(cinder, backend) as volume_type:
        instance = host.instance(
            image=None, root_gb=0, imagebackend__volume_type=volume_type
        )
        kept = Lifecycle.PERSISTENT
        disks = [
            DiskSpec(
                name="mine", path=str(content), volume_type=volume_type, lifecycle=kept
            ),
            DiskSpec(
                name="swap",
                size=MiB,
                fs="swap",
                volume_type=volume_type,
                lifecycle=kept,
            ),
        ]
        manager.create(instance, disks)
        agree(host, manager)
        mine, swap = manager.connect(instance.id)
        assert decrypted(mine, 0, 2 * MiB) == content.read_bytes()
        assert decrypted(swap, 0, MiB)[4086:4096] == b"SWAPSPACE2"
        manager.disconnect(instance.id)
        disk = next(each for each in manager.list() if each.name == "mine")
        found = at_rest(cinder, disk.handle["volume"], backend, "LUKS", "IN-PLAIN-")
        assert found == "LUKS"
        # Out of it: into another kind of disk, whose bytes are plain.
        copy = host.instance(image=None, root_gb=0)
        spec = DiskSpec(name="copy", base=disk.id, backend="raw", lifecycle=kept)
        manager.create(copy, [spec])
        (plain,) = manager.connect(copy.id)
        with open(plain.source.path, "rb") as file:  # type: ignore[union-attr]
            assert file.read(2 * MiB) == content.read_bytes()
        nothing_wrong(manager)
        for each in (instance, copy):
            manager.destroy(each.id)
        for gone in list(manager.list()):
            manager.delete_disk(gone.id)
        assert cinder.volumes() == []
    said = "".join([*started, caplog.text])
    assert "key-secret" in said and "memfd" not in said
    stored = b"".join(
        path.read_bytes() for path in (host.path / "store").glob("*.sqlite*")
    )
    assert stored and PASSPHRASE not in said
    assert PASSPHRASE.encode() not in stored


@on("rbd1")
def test_an_image_of_an_encrypted_disk_has_its_bytes(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
    guest_image: str,
    backend: str,
) -> None:
    live, stopped = str(uuid.uuid4()), str(uuid.uuid4())
    for each in (live, stopped):
        images.expect(cinder.cloud.admin, each)
    with encrypted(cinder, backend) as volume_type:
        instance = host.instance(guest_image, imagebackend__volume_type=volume_type)
        manager.create(instance)
        with running(manager, instance) as guest:
            guest.command("write vda 100 1 kept")
            wanted = guest.command("sum vda 100 1").split()[1]
            domain = Guest.lookup(host.conf, instance.id)
            manager.snapshot(instance.id, UploadTarget(live, "qcow2"), domain)
            guest.poweroff()
        taken = [live]
        # In Ceph, what was never written is noise, which takes its time.
        if backend.startswith("nfs"):
            manager.snapshot(instance.id, UploadTarget(stopped, "qcow2"))
            taken.append(stopped)
        agree(host, manager)
        for image in taken:
            path = host.path / image
            cinder.cloud.admin.image.download_image(image, output=str(path))
            data = read_disk(FileSource(str(path), "qcow2"), 100 * MiB, MiB)
            assert hashlib.sha256(data).hexdigest() == wanted
        manager.destroy(instance.id)


@on("nfs1")
def test_an_encrypted_volume_is_filled_anew_in_place(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    images: Images,
    backend: str,
) -> None:
    option(host, "rebuild", "always")
    first, second = (os.urandom(MiB) for _ in range(2))
    image, other = (
        images.upload(cinder.cloud.admin, data, visibility="public")
        for data in (first, second)
    )
    with encrypted(cinder, backend) as volume_type:
        instance = host.instance(image, imagebackend__volume_type=volume_type)
        manager.create(instance)
        before = of(cinder, manager, instance.id)["id"]
        for told, data in ((None, first), (other, second)):
            if told is not None:
                manager.rebuild(dataclasses.replace(instance, image=told))
            (connection,) = manager.connect(instance.id)
            assert decrypted(connection, 0, MiB) == data
            manager.disconnect(instance.id)
        assert of(cinder, manager, instance.id)["id"] == before
        agree(host, manager)
        manager.destroy(instance.id)


@pytest.mark.parametrize("provider", ["plain", "luks2", "vendor.Encryptor"])
def test_what_only_a_kernel_decrypts_is_refused_before_anything_is_made(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    provider: str,
) -> None:
    with encrypted(cinder, "rbd1", provider) as volume_type:
        instance = host.instance(image=None, imagebackend__volume_type=volume_type)
        for verb in (manager.plan, manager.create):
            with pytest.raises(exc.NotSupported) as caught:
                verb(instance)
            for part in (volume_type, provider, "'luks' on Ceph or NFS would do"):
                assert part in caught.value.message
        assert list(manager.list()) == [] and cinder.volumes() == []


@MOUNTS
@pytest.mark.parametrize(
    "name, kind",
    [("Forbidding", exc.ConfigError), ("Talkative", exc.StorageUnavailable)],
)
def test_without_the_key_nothing_is_begun_and_nothing_said_of_it(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    caplog: pytest.LogCaptureFixture,
    name: str,
    kind: type[exc.ImageBackendError],
) -> None:
    with encrypted(cinder, "nfs1") as volume_type:
        instance = host.instance(image=None, imagebackend__volume_type=volume_type)
        manager.create(instance)
        manager.connect(instance.id)
        keys(host, name)
        with pytest.raises(kind, match="key 00000000-0000"):
            manager.libvirt_xml(instance.id)
        manager.disconnect(instance.id)
        swap = host.instance(
            image=None, root_gb=0, swap_mb=1, imagebackend__volume_type=volume_type
        )
        with pytest.raises(kind) as caught:
            manager.create(swap)
        assert PASSPHRASE not in f"{caught.value!r}{caplog.text}"
        assert len(cinder.volumes()) == 1
        agree(host, manager)
        manager.destroy(instance.id)


def test_a_types_own_limits_win_over_the_flavors(
    host: HostUnderTest,
    manager: DiskManager,
    cinder: CinderUnderTest,
    guest_image: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    asked = {
        "read_bytes_sec": "104857600",
        "write_iops_sec_per_gb": "400",
        "made_up": "1",
    }
    with (
        qos(cinder, "front-end", asked) as limited,
        qos(cinder, "back-end", {"total_iops_sec": "77"}) as other,
    ):
        for volume_type, wanted in (
            (limited, {"read_bytes_sec": "104857600", "write_iops_sec": "400"}),
            (other, {"total_bytes_sec": "99999744"}),
        ):
            instance = host.instance(
                guest_image,
                imagebackend__volume_type=volume_type,
                quota__disk_total_bytes_sec="99999744",
            )
            manager.create(instance)
            with running(manager, instance) as guest:
                element = ET.fromstring(guest.xml()).find("./devices/disk/iotune")
                assert element is not None
                assert {each.tag: each.text for each in element} == wanted
                guest.poweroff()
            manager.destroy(instance.id)
    assert "made_up = '1' is not heeded" in caplog.text


@contextmanager
def qos(cinder: CinderUnderTest, consumer: str, specs: dict[str, str]) -> Iterator[str]:
    """A volume type with limits."""
    api = cinder.cloud.admin.block_storage
    with cinder.type_of("rbd1") as name:
        listed = cinder.get("/types")["volume_types"]
        (type_id,) = [each["id"] for each in listed if each["name"] == name]
        body = {"name": name, "consumer": consumer, **specs}
        answer = api.post("/qos-specs", json={"qos_specs": body})
        assert answer.status_code == 200, answer.text
        path = f"/qos-specs/{answer.json()['qos_specs']['id']}"
        try:
            answer = api.get(f"{path}/associate?vol_type_id={type_id}")
            assert answer.status_code == 202, answer.text
            yield name
        finally:
            cinder.clean()
            api.delete(f"{path}?force=True")
