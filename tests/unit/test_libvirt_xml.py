# SPDX-License-Identifier: Apache-2.0
"""Disk XML for every kind of source, held against libvirt's own schema."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from imagebackend import exceptions as exc
from imagebackend.libvirt.xml import DiskDevice, disk_xml
from imagebackend.model import (
    BlockSource,
    Connection,
    Encryption,
    FileSource,
    NetworkHost,
    NetworkSource,
    Source,
)
from tests.conftest import HostUnderTest

SCHEMA = "/usr/share/libvirt/schemas/domain.rng"
SERIAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
ODD = "/var/lib/a & b <c> 'd' \"e\", ü/disk"

SOURCES: dict[str, Source] = {
    "raw file": FileSource("/var/lib/disk", "raw"),
    "odd path": FileSource(ODD, "qcow2", FileSource(ODD + ".base", "raw")),
    "chain": FileSource(
        "/a", "qcow2", FileSource("/b", "qcow2", FileSource("/c", "raw"))
    ),
    "block": BlockSource("/dev/disk/by-id/x"),
    "rbd": NetworkSource(
        "rbd",
        "pool/image",
        hosts=(
            NetworkHost("192.0.2.1", 3300),
            NetworkHost("2001:db8::1", 6789),
            NetworkHost("mon.example.org"),
        ),
        user="nova",
        secret_uuid=SERIAL,
        secret_type="ceph",
    ),
    "rbd without cephx": NetworkSource(
        "rbd", "pool/image", hosts=(NetworkHost("192.0.2.1", 6789),)
    ),
    "nbd": NetworkSource("nbd", "export", hosts=(NetworkHost("192.0.2.1", 10809),)),
    "nbd socket": NetworkSource("nbd", "export", hosts=(NetworkHost("/run/x.sock"),)),
    "iscsi": NetworkSource(
        "iscsi",
        "iqn.2026-01.org.example:disk/1",
        hosts=(NetworkHost("192.0.2.1", 3260),),
        user="chap",
        secret_uuid=SERIAL,
        secret_type="iscsi",
    ),
}
IOTUNE = {"read_bytes_sec": 1000000, "write_bytes_sec": 2000000, "total_iops_sec": 500}


def valid(elements: list[str], folder: Path) -> None:
    """libvirt's schema accepts a domain with them."""
    domain = ET.fromstring(
        '<domain type="kvm"><name>x</name><memory>131072</memory>'
        '<os><type arch="x86_64" machine="pc">hvm</type></os><devices/></domain>'
    )
    devices = domain.find("devices")
    assert devices is not None
    devices.extend(ET.fromstring(each) for each in elements)
    path = folder / "domain.xml"
    path.write_text(ET.tostring(domain, encoding="unicode"))
    done = subprocess.run(
        ["xmllint", "--noout", "--relaxng", SCHEMA, path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stderr}\n{path.read_text()}"


@pytest.mark.parametrize("name", SOURCES)
def test_the_schema_accepts_every_source_on_every_bus(
    host: HostUnderTest, tmp_path: Path, name: str
) -> None:
    elements = []
    buses = (
        ("virtio", "vd"),
        ("scsi", "sd"),
        ("sata", "sd"),
        ("ide", "hd"),
        ("usb", "sd"),
    )
    flags = itertools.product(buses, (False, True), (False, True), (False, True))
    for (bus, prefix), cdrom, shareable, tuned in flags:
        device = DiskDevice(
            SERIAL,
            bus,
            f"{prefix}a",
            cdrom=cdrom,
            readonly=cdrom,
            boot_order=1 if tuned else None,
            shareable=shareable,
            iotune=IOTUNE if tuned else {},
        )
        connection = Connection(SOURCES[name], "host")
        elements.append(disk_xml(device, connection, host.conf))
    valid(elements, tmp_path)


@pytest.mark.parametrize("name", SOURCES)
def test_the_schema_accepts_every_source_encrypted(
    host: HostUnderTest, tmp_path: Path, name: str
) -> None:
    layer = Encryption("luks", SERIAL)
    connection = Connection(SOURCES[name], "host", encryption=layer)
    text = disk_xml(DiskDevice(SERIAL, "virtio", "vda"), connection, host.conf)
    secret = ET.fromstring(text).find("./source/encryption[@format='luks']/secret")
    assert secret is not None
    assert secret.attrib == {"type": "passphrase", "uuid": SERIAL}
    valid([text], tmp_path)


def test_every_option_is_accepted(host: HostUnderTest, tmp_path: Path) -> None:
    group = "imagebackend_libvirt"
    host.set("detect_zeroes", "unmap", group)
    host.set("discard", "ignore", group)
    host.set("iothread", 1, group)
    modes = ("none", "writeback", "writethrough", "directsync", "unsafe")
    elements = []
    for mode in modes:
        host.set("cache_modes", [f"file={mode}", f"network={mode}"], group)
        for source in SOURCES.values():
            device = DiskDevice(SERIAL, "virtio", "vda")
            elements.append(disk_xml(device, Connection(source, "host"), host.conf))
    assert all('iothread="1"' in each for each in elements)
    assert all('detect_zeroes="unmap"' in each for each in elements)
    valid(elements, tmp_path)


def element(host: HostUnderTest, source: Source, **device: object) -> ET.Element:
    made = DiskDevice(SERIAL, "virtio", "vda", **device)  # type: ignore[arg-type]
    return ET.fromstring(disk_xml(made, Connection(source, "host"), host.conf))


def test_formats_and_the_whole_chain_are_given_so_that_nothing_is_probed(
    host: HostUnderTest,
) -> None:
    disk = element(host, SOURCES["chain"])
    found, level = [], disk.find("backingStore")
    while level is not None and level.find("format") is not None:
        formats, source = level.find("format"), level.find("source")
        assert formats is not None and source is not None
        found.append((formats.get("type"), source.get("file")))
        level = level.find("backingStore")
    assert found == [("qcow2", "/b"), ("raw", "/c")]
    assert level is not None and len(level) == 0  # the end is said to be the end
    plain = element(host, SOURCES["raw file"]).find("backingStore")
    assert plain is not None and len(plain) == 0


def test_odd_paths_are_the_same_after_parsing(host: HostUnderTest) -> None:
    source = element(host, SOURCES["odd path"]).find("source")
    assert source is not None and source.get("file") == ODD


def test_no_secret_is_in_the_xml_but_its_name(host: HostUnderTest) -> None:
    secret = element(host, SOURCES["rbd"]).find("./source/auth/secret")
    assert secret is not None
    assert dict(secret.attrib) == {"type": "ceph", "uuid": SERIAL}
    assert element(host, SOURCES["rbd without cephx"]).find("./source/auth") is None


def test_a_shareable_disk_is_never_cached_and_a_cd_is_read_only(
    host: HostUnderTest,
) -> None:
    host.set("cache_modes", ["file=writeback"], "imagebackend_libvirt")
    shared = element(host, SOURCES["raw file"], shareable=True)
    driver = shared.find("driver")
    assert driver is not None and driver.get("cache") == "none"
    cd = element(host, SOURCES["raw file"], cdrom=True)
    assert cd.get("device") == "cdrom" and cd.find("readonly") is not None


def test_a_file_system_that_cannot_bypass_the_cache_is_not_asked_to(
    host: HostUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FileSource(str(tmp_path / "disk"), "raw")
    (tmp_path / "disk").touch()
    real = os.open

    def refuses(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    # As tmpfs before Linux 6.6, and some network file systems.
    monkeypatch.setattr(os, "open", refuses)
    driver = element(host, source).find("driver")
    assert driver is not None and driver.get("cache") == "writeback"
    monkeypatch.setattr(os, "open", real)
    driver = element(host, source).find("driver")
    assert driver is not None and driver.get("cache") == "none"


@pytest.mark.parametrize("value", ["file", "file=fast", "disk=none", "=", "file="])
def test_a_cache_mode_that_is_none_is_refused_with_those_there_are(
    host: HostUnderTest, value: str
) -> None:
    host.set("cache_modes", [value], "imagebackend_libvirt")
    with pytest.raises(exc.ConfigError, match="writethrough") as caught:
        element(host, SOURCES["raw file"])
    assert value in caught.value.message


@pytest.mark.field("A5")
@pytest.mark.parametrize("name", SOURCES)
def test_the_xml_ends_the_chain_of_every_kind_of_source(
    host: HostUnderTest, name: str
) -> None:
    level = element(host, SOURCES[name]).find("backingStore")
    assert level is not None
    while (below := level.find("backingStore")) is not None:
        level = below
    assert len(level) == 0 and dict(level.attrib) == {}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("readonly", [False, True])
def test_a_guest_sees_the_disk_that_was_meant(
    host: HostUnderTest, name: str, readonly: bool
) -> None:
    disk = element(host, SOURCES[name], readonly=readonly, boot_order=1, iotune=IOTUNE)
    target, serial = disk.find("target"), disk.find("serial")
    boot, limits, driver = disk.find("boot"), disk.find("iotune"), disk.find("driver")
    assert target is not None and dict(target.attrib) == {"dev": "vda", "bus": "virtio"}
    assert serial is not None and serial.text == SERIAL
    assert boot is not None and boot.get("order") == "1"
    assert limits is not None and driver is not None
    assert {each.tag: int(each.text or "") for each in limits} == IOTUNE
    assert driver.get("type") == SOURCES[name].format
    assert (disk.find("readonly") is not None) is readonly
    assert disk.get("type") == SOURCES[name].kind and disk.get("device") == "disk"


@pytest.mark.parametrize("text", ["nul\0", "esc\x1b[2J", "half\ud800", "\uffff"])
def test_a_path_that_xml_cannot_name_is_refused_rather_than_mangled(
    host: HostUnderTest, text: str
) -> None:
    for source in (
        FileSource(f"/a/{text}", "raw"),
        FileSource("/a", "qcow2", FileSource(f"/b/{text}", "raw")),
        BlockSource(f"/dev/{text}"),
        NetworkSource("rbd", f"pool/{text}"),
    ):
        with pytest.raises(exc.HostError, match="XML cannot name") as caught:
            element(host, source)
        assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "text", ["line\nfeed", "tab\t", "cr\r", "&amp;", "]]>", "<!--"]
)
def test_a_path_is_the_same_after_parsing_whatever_is_in_it(
    host: HostUnderTest, text: str
) -> None:
    source = FileSource(f"/a/{text}", "qcow2", FileSource(f"/b/{text}", "raw"))
    disk = element(host, source)
    found = disk.find("source"), disk.find("./backingStore/source")
    assert [each is not None and each.get("file") for each in found] == [
        f"/a/{text}",
        f"/b/{text}",
    ]


def test_qemu_img_and_libvirt_are_told_the_same_addresses() -> None:
    def server(*hosts: NetworkHost) -> object:
        return NetworkSource("nbd", "x", hosts=hosts).image_opts()["file"]["server"]

    assert server(NetworkHost("/run/x.sock")) == {"type": "unix", "path": "/run/x.sock"}
    inet = {"type": "inet", "host": "nbd.example.org", "port": "10809"}
    assert server(NetworkHost("nbd.example.org")) == inet
    assert server(NetworkHost("nbd.example.org", 10809)) == inet
    for source in (NetworkSource("nbd", "x"), NetworkSource("iscsi", "iqn.x")):
        with pytest.raises(exc.NotSupported, match=source.protocol):
            source.image_opts()


@pytest.mark.parametrize("mode", ["none", "directsync"])
def test_a_mode_is_as_the_option_says_where_the_file_system_can(
    host: HostUnderTest, tmp_path: Path, mode: str
) -> None:
    (tmp_path / "disk").touch()
    host.set("cache_modes", [f"file = {mode}"], "imagebackend_libvirt")
    driver = element(host, FileSource(str(tmp_path / "disk"), "raw")).find("driver")
    assert driver is not None and driver.get("cache") == mode
