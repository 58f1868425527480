# SPDX-License-Identifier: Apache-2.0
"""Secrets that QEMU needs to open a disk, kept by libvirt for QEMU alone."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

from oslo_config import cfg

from imagebackend.libvirt.connection import connect, library, translated
from imagebackend.model import Secret

#: What a kind of usage calls the thing that it is for, if not its name.
_USAGES = {"volume": "volume", "iscsi": "target"}


def define(conf: cfg.ConfigOpts, secret: Secret) -> None:
    """libvirt has the secret, with this value, when it returns.

    Private: nobody can read it back. Not ephemeral: a guest that libvirt starts by
    itself after a restart of the host finds it.

    :raises HypervisorError: libvirt does not answer, or refuses.
    """
    libvirt = library()
    connection = connect(conf)
    try:
        known = connection.secretDefineXML(_xml(secret))
        known.setValue(base64.b64decode(secret.value))
    except libvirt.libvirtError as error:
        raise translated(f"define secret {secret.uuid} ({secret.name})", error) from (
            error
        )


def undefine(conf: cfg.ConfigOpts, uuid: str) -> None:
    """libvirt has it no longer. It never had: success.

    :raises HypervisorError: libvirt does not answer, or refuses.
    """
    libvirt = library()
    connection = connect(conf)
    try:
        connection.secretLookupByUUIDString(uuid).undefine()
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_SECRET:
            raise translated(f"forget secret {uuid}", error) from error


@contextlib.contextmanager
def restored(conf: cfg.ConfigOpts) -> Iterator[None]:
    """Secrets that were defined in the block are gone after it.

    Not for a service: another guest may have begun to need one.

    :raises HypervisorError:
    """
    before = set(_uuids(conf))
    try:
        yield
    finally:
        libvirt = library()
        connection = connect(conf)
        for each in set(_uuids(conf)) - before:
            with contextlib.suppress(libvirt.libvirtError):
                connection.secretLookupByUUIDString(each).undefine()


def _uuids(conf: cfg.ConfigOpts) -> list[str]:
    libvirt = library()
    try:
        return [str(each.UUIDString()) for each in connect(conf).listAllSecrets()]
    except libvirt.libvirtError as error:
        raise translated("list libvirt's secrets", error) from error


def _xml(secret: Secret) -> str:
    root: Any = ET.Element("secret", ephemeral="no", private="yes")
    ET.SubElement(root, "uuid").text = secret.uuid
    ET.SubElement(root, "description").text = secret.name
    usage = ET.SubElement(root, "usage", type=secret.usage)
    ET.SubElement(usage, _USAGES.get(secret.usage, "name")).text = secret.name
    return ET.tostring(root, encoding="unicode")
