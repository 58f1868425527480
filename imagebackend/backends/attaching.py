# SPDX-License-Identifier: Apache-2.0
"""This host's way to a volume, from the connection info that Cinder gives.

QEMU reaches volumes in Ceph by itself; for everything else os-brick makes a file or a
device of this host. Connection info has passwords: it is used, and never kept.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend.backends import generic
from imagebackend.model import (
    JSON,
    BlockSource,
    Connector,
    FileSource,
    Handle,
    NetworkHost,
    NetworkSource,
    Secret,
    Source,
)

if TYPE_CHECKING:
    from imagebackend.backends.ceph import Cluster

LOG = log.getLogger(__name__)

#: What a target is whose bytes may be another's.
BLOCK = BlockSource
_RBD = "rbd"
_CEPH = ("ceph", _RBD)
#: Of no effect: what needs root, privsep does ([privsep_osbrick] says how).
_ROOT = "sudo"
#: Protocols of volumes that are files on a share.
_FILES = frozenset(("nfs", "glusterfs", "smbfs", "quobyte", "vzstorage", "scality"))
_LIMITS = frozenset(
    f"{way}_{unit}_sec"
    for way in ("read", "write", "total")
    for unit in ("bytes", "iops")
)
_setup_lock = threading.Lock()
#: Deadlines of QEMU's tools at a cluster, seconds.
_CONNECT, _OPERATE = 10, 60


def is_file(protocol: str) -> bool:
    """Whether a pool of that protocol has files on a share."""
    return protocol.lower() in _FILES


def needs_host(handle: Handle) -> bool:
    """Whether a volume is to be a file or device of this host."""
    return str(handle.get("protocol", "")).lower() not in _CEPH


def connector(
    conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr, to: Connector, full: bool
) -> JSON:
    """What Cinder is told of this host.

    :param full: with what os-brick finds out: initiators, and the like.
    """
    found: JSON = {
        "platform": platform.machine(),
        "os_type": sys.platform,
        "multipath": bool(options.multipath),
    }
    if full:
        # What os-brick lacks is told before anything is attached.
        _set_up(conf, options)
        found |= _initiators(bool(options.multipath))
    # As Nova on this host says it: storages know the host by it already.
    found["host"] = to.hostname
    address = to.ip or options.my_ip
    if address:
        found["ip"] = address
    return found


@functools.lru_cache(maxsize=8)
def _initiators(multipath: bool) -> Mapping[str, Any]:
    _as_root()
    from os_brick.initiator import connector as brick

    with _quiet():
        found: JSON = brick.get_connector_properties(
            _ROOT, None, multipath, enforce_multipath=multipath
        )
    return {key: value for key, value in found.items() if value is not None}


def attach(
    conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr, info: JSON
) -> Source:
    """Make the volume reachable on this host, encrypted if it is. Again: the same."""
    protocol = protocol_of(info)
    if protocol == _RBD:
        return _network(conf, options, info)
    path = _brick(conf, options, info, "attach")
    if is_file(protocol):
        # Cinder makes an encrypted file as qcow2, and says that it is raw.
        if info.get("encrypted"):
            return FileSource(path, "qcow2")
        told = str(info.get("format") or "raw")
        # With a snapshot of somebody's the volume is a file on top of others.
        if told == "qcow2":
            return generic.qcow2_chain(path)
        return FileSource(path, told)
    return BlockSource(path)


def limits(info: JSON) -> Mapping[str, int]:
    """What the volume's type has the host limit, by libvirt's names."""
    found: dict[str, int] = {}
    for key, value in (info.get("qos_specs") or {}).items():
        if key in _LIMITS and str(value).isdecimal():
            found[key] = int(value)
        else:
            LOG.info("QoS of a volume type: %s = %r is not heeded", key, value)
    for unit in ("bytes", "iops"):
        parts = found.get(f"read_{unit}_sec") or found.get(f"write_{unit}_sec")
        if parts and found.get(f"total_{unit}_sec"):
            LOG.info("QoS of a volume type: total_%s_sec beside its parts", unit)
            # libvirt takes one or the other.
            del found[f"total_{unit}_sec"]
    return found


def detach(
    conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr, info: JSON | None
) -> None:
    """Let go on this host. Not attached: success."""
    if info and protocol_of(info) != _RBD:
        _brick(conf, options, info, "detach")


def users(
    conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr, info: JSON
) -> Sequence[str]:
    """Who has the volume open, as far as this host can tell.

    :raises StorageUnavailable: what could tell does not answer.
    """
    protocol = protocol_of(info)
    if protocol == _RBD:
        source = _network(conf, options, info)
        pool, _, name = source.name.partition("/")
        try:
            cluster = _cluster(conf, options, source.user or "")
            with (
                contextlib.closing(cluster),
                cluster.image(pool, name, read_only=True) as image,
            ):
                return [f"client {each}" for each in image.watchers()]
        except (exc.HostError, exc.ObjectMissing) as error:
            LOG.debug("%s: not known who has %s open", error, source.name)
            return ()
    if is_file(protocol) and generic.qemu_has_open(_brick(conf, options, info, "find")):
        return ("a QEMU of this host",)
    return ()


def secrets(
    conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr, source: Source
) -> Sequence[Secret]:
    """What QEMU must know to open the volume. Nothing, where this host has no keyring:
    then the operator gave libvirt the secret that Cinder names."""
    if not isinstance(source, NetworkSource) or not source.user:
        return ()
    try:
        return (_cluster(conf, options, source.user).secret(source.secret_uuid),)
    except (exc.HostError, exc.StorageUnavailable) as error:
        LOG.info("%s: libvirt has to have secret %s", error, source.secret_uuid)
        return ()


def protocol_of(info: JSON) -> str:
    """Of a connection, as ``rbd`` or ``nfs``."""
    return str(info.get("driver_volume_type", "")).lower()


def _network(
    conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr, info: JSON
) -> NetworkSource:
    user = info.get("auth_username") if info.get("auth_enabled") else None
    cluster = _cluster(conf, options, user or "")
    hosts = zip(info.get("hosts") or (), info.get("ports") or (), strict=True)
    return NetworkSource(
        protocol=_RBD,
        name=info["name"],
        hosts=tuple(NetworkHost(name.strip("[]"), int(port)) for name, port in hosts),
        user=user,
        # Where Cinder names none, it is ours to define.
        secret_uuid=(info.get("secret_uuid") or cluster.secret_uuid) if user else None,
        secret_type="ceph" if user else None,
        conf=cluster.tools_conf(),
    )


def _cluster(
    conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr, user: str
) -> Cluster:
    group = options._group.name
    try:
        from imagebackend.backends.ceph import Cluster
    except ImportError as error:
        raise exc.MissingDependency(
            f"backend {group!r}: the volume is in Ceph, and {error.name} is not "
            f"installed: install python3-rados and python3-rbd of your distribution",
            library=error.name,
        ) from error
    folder = os.path.join(conf.imagebackend.state_path, "ceph", group)
    return Cluster(group, options.ceph_conf, user, _CONNECT, _OPERATE, folder)


# --- os-brick ----------------------------------------------------------------------


def _brick(
    conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr, info: JSON, verb: str
) -> str:
    """:returns: the path of what was attached."""
    protocol = protocol_of(info)
    _set_up(conf, options)
    from os_brick import exception as brick_exc
    from os_brick.initiator import connector as brick
    from oslo_concurrency import processutils

    mounts = options.mount_path or os.path.join(conf.imagebackend.state_path, "mnt")
    try:
        with _quiet():
            made = brick.InitiatorConnector.factory(
                protocol,
                _ROOT,
                use_multipath=bool(options.multipath),
                conn=info,
                **{f"{protocol}_mount_point_base": mounts},
            )
            if verb == "attach":
                os.makedirs(mounts, mode=0o711, exist_ok=True)
                return str(made.connect_volume(dict(info))["path"])
            if verb == "find":
                return str(made.get_volume_paths(dict(info))[0])
            made.disconnect_volume(dict(info), None, ignore_errors=False)
    except brick_exc.InvalidConnectorProtocol as error:
        raise exc.NotSupported(
            f"this host cannot {verb} volumes of protocol {protocol!r}: {error}",
            protocol=protocol,
        ) from error
    except processutils.ProcessExecutionError as error:
        # Its command line may have a password.
        raise exc.HostError(
            f"cannot {verb} a volume of protocol {protocol!r} on this host: "
            f"{(error.stderr or error.description or '').strip()}",
            protocol=protocol,
        ) from None
    except (brick_exc.BrickException, OSError) as error:
        raise exc.HostError(
            f"cannot {verb} a volume of protocol {protocol!r} on this host: {error}",
            protocol=protocol,
        ) from error
    return ""


def _set_up(conf: cfg.ConfigOpts, options: cfg.ConfigOpts.GroupAttr) -> None:
    """os-brick's locks, once a process. It reads them from the global configuration."""
    with _setup_lock:
        _as_root()
        import os_brick
        from oslo_concurrency import lockutils as _registers  # noqa: F401

        mine = cfg.CONF
        path = options.lock_path or mine.oslo_concurrency.lock_path
        group = options._group.name
        if not path:
            raise exc.ConfigError(
                f"[{group}] lock_path is not set, nor [oslo_concurrency] lock_path: "
                f"os-brick needs a folder for locks that all processes of this host "
                f"have in common",
                option="lock_path",
            )
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise exc.ConfigError(
                f"[{group}] lock_path {path} cannot be made: {error}"
            ) from error
        if not mine.oslo_concurrency.lock_path:
            mine.set_default("lock_path", path, "oslo_concurrency")
        os_brick.setup(mine)
        if options.lock_path:
            mine.set_default("lock_path", path, "os_brick")


def _as_root() -> None:
    """A process that is root needs no helper that is."""
    try:
        from os_brick import privileged
    except ImportError as error:
        raise exc.MissingDependency(
            f"the Python library {error.name} is missing, which attaches volumes to "
            f"this host: install imagebackend[cinder]",
            library=error.name,
        ) from error
    if os.geteuid() == 0:
        privileged.default.set_client_mode(False)
        privileged.brick_privsep_hide_output.set_client_mode(False)


class _quiet:
    """os-brick's log of a connection has what Cinder sent, passwords too."""

    def __enter__(self) -> None:
        logger = logging.getLogger("os_brick")
        if logger.level < logging.INFO:
            logger.setLevel(logging.INFO)

    def __exit__(self, *_args: object) -> None:
        return None
