# SPDX-License-Identifier: Apache-2.0
"""Encrypted volumes, where the layer of encryption is one that QEMU reads itself.

Cinder's drivers for Ceph and for NFS write LUKS into a new volume; with others the
compute host formats it, and decrypts by the kernel's dm-crypt. Only the former can be
disks here. The passphrase comes from the key manager each time, by castellan; it goes
to libvirt and to QEMU's tools, and is kept nowhere else.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Any

from keystoneauth1 import exceptions as ks
from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend.backends.cinder import VolumeType
from imagebackend.model import Encryption, GiB, MiB, Secret

LOG = log.getLogger(__name__)

FORMAT = "luks"
#: What types have been told to name it by; os_brick/encryptors/__init__.py.
_PROVIDERS = (
    FORMAT,
    "LuksEncryptor",
    "os_brick.encryptors.luks.LuksEncryptor",
    "nova.volume.encryptors.luks.LuksEncryptor",
)
_CEPH, _NFS = ("ceph", "rbd"), "nfs"
#: QEMU's header, with room for eight passphrases of the longest key, rounded up.
_HEADER = 2 * MiB


def refuse(backend: str, kind: VolumeType) -> None:
    """:raises NotSupported: volumes of the type are encrypted in a way that QEMU cannot
    read."""
    reason = _against(kind.encryption, kind.protocol)
    if not reason and kind.multiattach:
        reason = "Cinder lets only one instance have an encrypted volume at a time"
    if reason:
        raise exc.NotSupported(
            f"backend {backend!r}: volume type {kind.name!r} is encrypted by provider "
            f"{kind.encryption!r} on volumes of protocol {kind.protocol!r}: {reason}: "
            f"provider {FORMAT!r} on Ceph or NFS would do, without multiattach, or a "
            f"type that is not encrypted",
            volume_type=kind.name,
            provider=kind.encryption,
        )


def layer(volume_id: str, provider: str, protocol: str) -> Encryption:
    """What QEMU has to do to read a volume.

    :raises NotSupported: it cannot.
    """
    reason = _against(provider, protocol)
    if reason:
        raise exc.NotSupported(
            f"volume {volume_id} is encrypted by provider {provider!r}, and of "
            f"protocol {protocol!r}: {reason}",
            volume=volume_id,
            provider=provider,
        )
    return Encryption(FORMAT, secret_uuid(volume_id))


def _against(provider: str, protocol: str) -> str:
    """Why QEMU cannot read it; empty: it can."""
    if provider == "luks2":
        return "neither QEMU nor Cinder's drivers know LUKS of version 2"
    if provider not in _PROVIDERS:
        return "only the kernel of a host can read that, and this library uses QEMU"
    if protocol.lower() not in (*_CEPH, _NFS):
        return "Cinder leaves such volumes for the compute host to format"
    return ""


def overhead(protocol: str) -> int:
    """Bytes of a volume that a guest may not get.

    The file that Cinder makes on a share is qcow2, which takes more than it holds. But
    Cinder takes it for raw, and does not attach one any more that has outgrown its
    volume: so that the volume is made a GiB larger than what is in it.
    """
    return GiB if protocol.lower() == _NFS else _HEADER


def secret_uuid(volume_id: str) -> str:
    """The same on every host and after every restart."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"cinder:{volume_id}/luks"))


def secret(conf: cfg.ConfigOpts, auth: Any, volume_id: str, key_id: str) -> Secret:
    """The volume's passphrase, as those who format volumes derive it.

    :param auth: keystoneauth's plugin of who may read the key.
    """
    passphrase = binascii.hexlify(_key(conf, auth, volume_id, key_id))
    return Secret(
        secret_uuid(volume_id),
        "volume",
        f"imagebackend volume {volume_id}",
        base64.b64encode(passphrase).decode(),
    )


def _key(conf: cfg.ConfigOpts, auth: Any, volume_id: str, key_id: str) -> bytes:
    try:
        from castellan import key_manager
        from castellan.common import exception as castellan_exc
        from oslo_context import context
    except ImportError as error:
        raise exc.MissingDependency(
            f"volume {volume_id} is encrypted, and the Python library {error.name} is "
            f"missing, which fetches its key: install imagebackend[cinder]",
            library=error.name,
        ) from error

    class Context(context.RequestContext):
        """Whom castellan logs in as; whatever the kind of credentials is."""

        def get_auth_plugin(self) -> Any:
            return auth

    what = f"cannot get key {key_id} of encrypted volume {volume_id}"
    values = {"volume": volume_id, "key": key_id}
    try:
        manager = key_manager.API(conf)
        found = manager.get(Context(overwrite=False), key_id).get_encoded()
    except castellan_exc.ManagedObjectNotFoundError as error:
        raise exc.IntegrityError(
            f"{what}: the key manager has no such key: without it nobody can read "
            f"the volume",
            **values,
        ) from error
    except (castellan_exc.Forbidden, ks.Unauthorized, ks.Forbidden) as error:
        raise exc.ConfigError(
            f"{what}: {error}: may the backend's service user read keys of the project "
            f"that owns the volume?",
            **values,
        ) from error
    except (castellan_exc.CastellanException, ks.ClientException) as error:
        raise exc.StorageUnavailable(f"{what}: {error}", **values) from error
    except Exception as error:
        # A key manager may be anybody's, and its errors may quote anything.
        raise exc.StorageUnavailable(
            f"{what}: the key manager {conf.key_manager.backend} fails with "
            f"{type(error).__name__}: its log may tell why",
            **values,
        ) from None
    if not found:
        raise exc.IntegrityError(f"{what}: it is empty", **values)
    return found
