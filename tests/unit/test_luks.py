# SPDX-License-Identifier: Apache-2.0
"""Encrypted disks: QEMU's own layer, its passphrase, and who can have it."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path
from typing import Any

import pytest
from keystoneauth1.plugin import BaseAuthPlugin

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.backends import attaching, luks
from imagebackend.backends.cinder import VolumeType
from imagebackend.model import (
    Connection,
    Encryption,
    FileSource,
    GiB,
    MiB,
    NetworkSource,
    Secret,
    UnlockedSource,
)
from imagebackend.qemu_img import QemuImg
from tests.conftest import HostUnderTest
from tests.key_manager import KEY_ID, PASSPHRASE

VOLUME = "5d1a0a1e-6a66-4f0d-9f2c-4a3e5f7d9b11"


def secret(passphrase: str = PASSPHRASE) -> Secret:
    value = base64.b64encode(passphrase.encode()).decode()
    return Secret(luks.secret_uuid(VOLUME), "volume", "test", value)


def encrypted(path: Path, kind: str) -> FileSource:
    """A file as Cinder's drivers make it."""
    prefix = "" if kind == "luks" else "encrypt."
    layer = () if kind == "luks" else ("-o", "encrypt.format=luks")
    subprocess.run(
        [
            *("qemu-img", "create", "-q", "-f", kind, *layer),
            *("--object", f"secret,id=s,data={PASSPHRASE}"),
            *("-o", f"{prefix}key-secret=s,{prefix}iter-time=10"),
            *(path, str(8 * MiB)),
        ],
        check=True,
    )
    return FileSource(str(path), "raw" if kind == "luks" else kind)


@pytest.mark.parametrize("kind", ["luks", "qcow2"])
def test_copies_into_and_out_of_an_encrypted_disk_are_whole_and_tell_no_one_the_key(
    host: HostUnderTest, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    run = processes.run

    def watched(argv: Any, **kwargs: Any) -> Any:
        started.extend(argv)
        return run(argv, **kwargs)

    monkeypatch.setattr(processes, "run", watched)
    layer = Encryption(luks.FORMAT, luks.secret_uuid(VOLUME))
    source = encrypted(host.path / "disk", kind)
    connection = Connection(source, "host", encryption=layer)
    unlocked = connection.copyable([secret()])
    assert isinstance(unlocked, UnlockedSource)
    data = host.raw_image(size=2 * MiB)
    data = data[:MiB] + bytes(MiB)  # zeros are content too
    (host.images / "raw-image.raw").write_bytes(data)
    plain = FileSource(str(host.images / "raw-image.raw"), "raw")
    tool = QemuImg(host.conf)
    assert tool.size_inside(source, layer) == 8 * MiB
    tool.convert(plain, unlocked, target_is_blank=kind == "qcow2")
    assert data[:4096] not in Path(source.path).read_bytes()
    tool.resize(unlocked, 16 * MiB)
    assert tool.size_inside(source, layer) == 16 * MiB
    out = host.path / "out"
    tool.convert_to_file(unlocked, str(out), "raw")
    copied = out.read_bytes()
    assert len(copied) == 16 * MiB and copied[: len(data)] == data
    assert PASSPHRASE not in " ".join(started)
    with pytest.raises(exc.StorageError, match="Invalid password"):
        tool.resize(connection.copyable([secret("wrong")]), 32 * MiB)


def test_a_passphrase_is_in_no_text_of_what_carries_it() -> None:
    layer = Encryption(luks.FORMAT, luks.secret_uuid(VOLUME))
    unlocked = UnlockedSource(FileSource("/disk", "raw"), layer, secret())
    assert secret().value not in f"{unlocked}{unlocked.image_opts()}"


def test_a_key_is_fetched_as_the_service_user_and_is_the_same_secret_each_time(
    host: HostUnderTest,
) -> None:
    use(host, "FixedKey")
    found = luks.secret(host.conf, BaseAuthPlugin(), VOLUME, KEY_ID)
    assert base64.b64decode(found.value).decode() == PASSPHRASE
    assert found == luks.secret(host.conf, BaseAuthPlugin(), VOLUME, KEY_ID)
    assert found.uuid == luks.layer(VOLUME, "luks", "rbd").secret_uuid
    assert found.uuid != luks.secret_uuid("another")
    with pytest.raises(exc.IntegrityError, match="no such key"):
        luks.secret(host.conf, BaseAuthPlugin(), VOLUME, "another")


@pytest.mark.parametrize(
    "manager, kind",
    [
        ("Forbidding", exc.ConfigError),
        ("Talkative", exc.StorageUnavailable),
        ("NotThere", exc.StorageUnavailable),
    ],
)
def test_a_key_manager_that_fails_is_named_and_not_quoted(
    host: HostUnderTest, manager: str, kind: type[exc.ImageBackendError]
) -> None:
    use(host, manager)
    with pytest.raises(kind, match=f"key {KEY_ID} of encrypted volume") as caught:
        luks.secret(host.conf, BaseAuthPlugin(), VOLUME, KEY_ID)
    assert PASSPHRASE not in f"{caught.value!r}{caught.value.__cause__!r}"


def use(host: HostUnderTest, manager: str) -> None:
    with open(host.conf.config_file[0], "a") as file:
        file.write(f"[key_manager]\nbackend = tests.key_manager.{manager}\n")
    host.conf.reload_config_files()


@pytest.mark.parametrize(
    "provider, protocol, multiattach, reason",
    [
        ("plain", "ceph", False, "only the kernel"),
        ("nova.volume.encryptors.cryptsetup.CryptsetupEncryptor", "ceph", False, ""),
        ("luks2", "ceph", False, "version 2"),
        ("luks", "iSCSI", False, "for the compute host to format"),
        ("luks", "", False, "for the compute host to format"),
        ("luks", "ceph", True, "only one instance"),
    ],
)
def test_what_qemu_cannot_read_is_refused_with_what_would_do(
    provider: str, protocol: str, multiattach: bool, reason: str
) -> None:
    extra = {"multiattach": "<is> True"} if multiattach else {}
    kind = VolumeType("id", "gold", True, extra, protocol, encryption=provider)
    with pytest.raises(exc.NotSupported, match=reason) as caught:
        luks.refuse("cinder", kind)
    for part in ("'gold'", repr(provider), "'luks' on Ceph or NFS would do"):
        assert part in caught.value.message
    if not multiattach:
        with pytest.raises(exc.NotSupported, match=VOLUME):
            luks.layer(VOLUME, provider, protocol)


@pytest.mark.parametrize("provider", ["luks", "os_brick.encryptors.luks.LuksEncryptor"])
@pytest.mark.parametrize("protocol", ["ceph", "NFS"])
def test_what_qemu_reads_is_planned_with_room_for_what_it_takes(
    provider: str, protocol: str
) -> None:
    kind = VolumeType("id", "gold", True, {}, protocol, encryption=provider)
    luks.refuse("cinder", kind)
    assert luks.overhead(protocol) in (2 * MiB, GiB)


def test_limits_are_those_that_libvirt_takes() -> None:
    told = {
        "read_bytes_sec": "1000000",
        "write_iops_sec": 500,
        "total_iops_sec": "900",
        "total_bytes_sec": "0",
        "read_iops_sec_max": "7",
        "write_bytes_sec": "many",
    }
    assert attaching.limits({"qos_specs": told}) == {
        "read_bytes_sec": 1000000,
        "write_iops_sec": 500,
        "total_bytes_sec": 0,
    }
    assert attaching.limits({"qos_specs": None}) == attaching.limits({}) == {}


def test_a_network_disk_is_encrypted_above_its_protocol() -> None:
    source = NetworkSource("rbd", "pool/image", user="me")
    layer = Encryption(luks.FORMAT, luks.secret_uuid(VOLUME))
    assert UnlockedSource(source, layer, secret()).image_opts() == {
        "driver": "luks",
        "key-secret": f"s{layer.secret_uuid}",
        "file": {"driver": "rbd", "pool": "pool", "image": "image", "user": "me"},
    }


def test_an_encrypted_file_that_is_full_is_no_longer_than_its_volume(
    host: HostUnderTest,
) -> None:
    """Cinder attaches none that is; it made it longer as if it were raw."""
    source = encrypted(host.path / "disk", "qcow2")
    volume = 8 * MiB + luks.overhead("nfs")
    subprocess.run(
        ["qemu-img", "resize", "-q", "-f", "raw", source.path, str(volume)], check=True
    )
    layer = Encryption(luks.FORMAT, luks.secret_uuid(VOLUME))
    host.raw_image(size=8 * MiB)
    plain = FileSource(str(host.images / "raw-image.raw"), "raw")
    unlocked = UnlockedSource(source, layer, secret())
    QemuImg(host.conf).convert(plain, unlocked, target_is_blank=True)
    assert Path(source.path).stat().st_size == volume
