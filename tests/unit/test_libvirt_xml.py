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
