# SPDX-License-Identifier: Apache-2.0
"""libvirt's ``<disk>`` element, from a connection and what the guest is to see.

The source comes from the backend; everything else (bus, address, serial, limits,
boot order) is composed here, so that it is the same on every storage. Formats and
the whole backing chain are always written: libvirt would look into files otherwise.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.model import (
    BlockSource,
    Connection,
    Encryption,
    FileSource,
    NetworkSource,
    Source,
)

#: Characters that no XML document may have.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CACHE_MODES = ("none", "writeback", "writethrough", "directsync", "unsafe")
_KINDS = (FileSource.kind, BlockSource.kind, NetworkSource.kind)


@dataclass(frozen=True, slots=True)
class DiskDevice:
    """A disk as its guest sees it.

    :ivar iotune: libvirt's names, as ``read_bytes_sec``, to their limits.
    """

    serial: str
    bus: str
    device: str
    cdrom: bool = False
    readonly: bool = False
    boot_order: int | None = None
    shareable: bool = False
    iotune: Mapping[str, int] = field(default_factory=dict)


def disk_xml(device: DiskDevice, connection: Connection, conf: cfg.ConfigOpts) -> str:
    """The element as text.

    :raises ConfigError: ``cache_modes`` cannot be understood.
    :raises HostError: a path has characters that XML has not.
    """
    source = connection.source
    disk = ET.Element(
        "disk", type=source.kind, device="cdrom" if device.cdrom else "disk"
    )
    _driver(disk, device, source, conf)
    _source(disk, source, connection.encryption)
    # A chain that is not ended is one that libvirt looks for in the data.
    _backing(disk, source.backing if isinstance(source, FileSource) else None)
    ET.SubElement(disk, "target", dev=device.device, bus=device.bus)
    if device.iotune:
        limits = ET.SubElement(disk, "iotune")
        for name, value in device.iotune.items():
            ET.SubElement(limits, name).text = str(value)
    if device.readonly or device.cdrom:
        ET.SubElement(disk, "readonly")
    if device.shareable:
        ET.SubElement(disk, "shareable")
    ET.SubElement(disk, "serial").text = device.serial
    if device.boot_order is not None:
        ET.SubElement(disk, "boot", order=str(device.boot_order))
    ET.indent(disk)
    text = ET.tostring(disk, encoding="unicode")
    if _NO_XML.search(text):
        raise exc.HostError(
            f"disk {device.serial} has a source that XML cannot name: {source}",
            disk=device.serial,
        )
    return text


def _driver(
    disk: ET.Element, device: DiskDevice, source: Source, conf: cfg.ConfigOpts
) -> None:
    options = conf.imagebackend_libvirt
    cache = "none" if device.shareable else _cache_mode(source, conf)
    driver = ET.SubElement(disk, "driver", name="qemu", type=source.format, cache=cache)
    if not device.cdrom:
        driver.set("discard", options.discard)
        if options.detect_zeroes != "off":
            driver.set("detect_zeroes", options.detect_zeroes)
    if options.iothread and device.bus == "virtio":
        driver.set("iothread", str(options.iothread))


def cache_modes(conf: cfg.ConfigOpts) -> dict[str, str]:
    """Cache mode by kind of source. :raises ConfigError:"""
    modes = {"file": "none", "block": "none", "network": "writeback"}
    for item in conf.imagebackend_libvirt.cache_modes:
        kind, _, mode = (part.strip() for part in item.partition("="))
        if kind not in _KINDS or mode not in _CACHE_MODES:
            raise exc.ConfigError(
                f"[imagebackend_libvirt] cache_modes has {item!r}: it must be one of "
                f"{', '.join(_KINDS)}, equal to one of {', '.join(_CACHE_MODES)}",
                value=item,
            )
        modes[kind] = mode
    return modes


def _cache_mode(source: Source, conf: cfg.ConfigOpts) -> str:
    mode = cache_modes(conf)[source.kind]
    if mode in ("none", "directsync") and isinstance(source, FileSource):
        return mode if _direct(source.path) else "writeback"
    return mode


def _direct(path: str) -> bool:
    """Whether the file system can bypass the host's cache; tmpfs cannot."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as error:
        return error.errno != errno.EINVAL
    except ValueError:  # no path at all; XML will not have it either
        return True
    return True


def _source(parent: ET.Element, source: Source, encryption: Encryption | None) -> None:
    match source:
        case FileSource(path=path):
            element = ET.SubElement(parent, "source", file=path)
        case BlockSource(path=path):
            element = ET.SubElement(parent, "source", dev=path)
        case NetworkSource():
            element = _network(parent, source)
    if encryption is not None:
        layer = ET.SubElement(element, "encryption", format=encryption.format)
        ET.SubElement(layer, "secret", type="passphrase", uuid=encryption.secret_uuid)


def _network(parent: ET.Element, source: NetworkSource) -> ET.Element:
    element = ET.SubElement(
        parent, "source", protocol=source.protocol, name=source.name
    )
    for host in source.hosts:
        if host.unix:
            ET.SubElement(element, "host", transport="unix", socket=host.name)
            continue
        address = ET.SubElement(element, "host", name=host.name)
        if host.port is not None:
            address.set("port", str(host.port))
    if source.user is not None and source.secret_uuid is not None:
        auth = ET.SubElement(element, "auth", username=source.user)
        ET.SubElement(
            auth,
            "secret",
            type=source.secret_type or "ceph",
            uuid=source.secret_uuid,
        )
    return element


def _backing(parent: ET.Element, backing: FileSource | None) -> None:
    """The rest of the chain; an empty element ends it."""
    if backing is None:
        ET.SubElement(parent, "backingStore")
        return
    element = ET.SubElement(parent, "backingStore", type=backing.kind)
    ET.SubElement(element, "format", type=backing.format)
    ET.SubElement(element, "source", file=backing.path)
    _backing(element, backing.backing)
