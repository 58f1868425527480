# SPDX-License-Identifier: Apache-2.0
"""The only way to a Ceph cluster: one connection, deadlines, errors, addresses.

A :class:`Cluster` is made from a configuration file and a user, and everything that
names the cluster comes from it: handles, QEMU's sources, the secret for libvirt. The
key itself is read by librados and QEMU from the keyring; only :meth:`Cluster.secret`
reads it here.

librados may wait for ever for a cluster that is not there. So each call runs in a
thread of its own, which is left behind when the deadline passes, and so is the
connection: the next call makes a new one.
"""

from __future__ import annotations

import concurrent.futures
import configparser
import contextlib
import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import rados
import rbd
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.local_files import replace_text
from imagebackend.model import NetworkHost, NetworkSource, Secret

LOG = log.getLogger(__name__)
T = TypeVar("T")

#: What libvirt calls this kind of secret.
_CEPH = "ceph"
#: Seconds between two looks at a call that reports its progress.
_LOOK = 1.0
#: What of a cap a call needs, told when the cluster refuses it.
WRITE, READ = "profile rbd", "profile rbd-read-only"
#: To open an image of ours, of which the parent may be in a pool of others.
_OPEN = "open"


class Cluster:
    """One cluster, as one user. Keeps its arguments; connects when first used.

    :param backend: the backend's name, for messages.
    :param conf_file: as ``/etc/ceph/ceph.conf``; names monitors and keyring.
    :param user: without ``client.``
    :param connect_timeout: seconds. :param operation_timeout: seconds that a call may
        take, or stay without progress.
    :param folder: of ours, for the configuration that QEMU's tools get.
    """

    def __init__(
        self,
        backend: str,
        conf_file: str,
        user: str,
        connect_timeout: int,
        operation_timeout: int,
        folder: str,
    ) -> None:
        self.backend = backend
        self.conf_file = conf_file
        self.user = user
        self._connect_timeout = connect_timeout
        self._folder = os.path.abspath(folder)
        self.operation_timeout = operation_timeout
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    # --- what it is ----------------------------------------------------------

    @property
    def fsid(self) -> str:
        """The cluster's id. :raises StorageUnavailable, ConfigError:"""
        return self._connected().fsid

    def source(
        self, pool: str, image: str, secret_uuid: str | None = None
    ) -> NetworkSource:
        """How QEMU reaches an image, with the monitors that there are now.

        :param secret_uuid: of the operator's own libvirt secret.
        """
        return NetworkSource(
            protocol="rbd",
            name=f"{pool}/{image}",
            hosts=self.monitors(),
            user=self.user,
            secret_uuid=secret_uuid or self.secret_uuid,
            secret_type=_CEPH,
            conf=self.tools_conf(),
        )

    def tools_conf(self) -> str:
        """A copy of the configuration for QEMU's tools, with the deadline of our own
        calls: they would wait for an OSD for ever. Guests never see it."""
        try:
            with open(self.conf_file, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise exc.ConfigError(
                f"backend {self.backend!r}: cannot read {self.conf_file}: {error}",
                backend=self.backend,
            ) from error
        limits = {
            "client mount timeout": self._connect_timeout,
            "rados mon op timeout": self._connect_timeout,
            "rados osd op timeout": self.operation_timeout,
        }
        lines = [f"{option} = {value}" for option, value in limits.items()]
        text = "\n".join([text, "[client]", *lines, ""])
        # The file's name is the cluster's, which the keyring's may have in it.
        path = os.path.join(self._folder, os.path.basename(self.conf_file))
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            replace_text(path, text)
        except OSError as error:
            raise processes.space_error(error, path) from error
        return path

    def monitors(self) -> tuple[NetworkHost, ...]:
        """Every monitor's addresses, of both versions of the protocol."""
        found = []
        for monitor in self.command("mon dump")["mons"]:
            for address in monitor["public_addrs"]["addrvec"]:
                host, _, port = address["addr"].rpartition(":")
                found.append(NetworkHost(host.strip("[]"), int(port)))
        return tuple(dict.fromkeys(found))

    @property
    def secret_uuid(self) -> str:
        """The same on every host and after every restart."""
        name = f"ceph:{self.fsid}/client.{self.user}"
        return str(uuid.uuid5(uuid.NAMESPACE_URL, name))

    def secret(self, uuid: str | None = None) -> Secret:
        """This user's key, for libvirt.

        :param uuid: of the secret, where somebody else chose it.
        :raises ConfigError: no keyring that can be read has it.
        """
        connection = self._connected()
        section = f"client.{self.user}"
        key = connection.rados.conf_get("key")
        tried = [
            name.strip()
            for name in (connection.rados.conf_get("keyring") or "").split(",")
            if name.strip()
        ]
        for path in tried:
            if key:
                break
            ring = configparser.RawConfigParser(strict=False)
            with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
                with open(path, encoding="utf-8") as file:
                    # The lines of a section are indented in what Ceph writes.
                    ring.read_string("".join(line.lstrip() for line in file))
                key = ring.get(section, "key", fallback=None)
        if not key:
            raise exc.ConfigError(
                f"backend {self.backend!r}: no key of {section} can be read from "
                f"{', '.join(tried) or 'any keyring'}: QEMU needs it to start a guest",
                backend=self.backend,
                user=section,
            )
        return Secret(
            uuid or self.secret_uuid,
            _CEPH,
            f"imagebackend {section} {connection.fsid}",
            key,
        )

    # --- calls -----------------------------------------------------------------

    def call(
        self,
        what: str,
        function: Callable[..., T],
        *args: Any,
        pool: str = "",
        needs: str = WRITE,
        progress: bool | Callable[[int, int], None] = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> T:
        """Call into librados or librbd with a deadline.

        :param what: for the message, as ``create image vms/x``.
        :param pool: that it works on; with ``needs``, what cap that takes.
        :param progress: ``function`` takes ``on_progress``; each report renews the
            deadline, and is passed on.
        :raises StorageUnavailable: no answer in time.
        :raises ObjectMissing, ObjectExists, Busy, ConfigError, StorageError:
        """
        limit = timeout or self.operation_timeout
        alive = time.monotonic()
        if progress:

            def on_progress(done: int, total: int) -> int:
                nonlocal alive
                alive = time.monotonic()
                if callable(progress):
                    progress(done, total)
                return 0

            kwargs["on_progress"] = on_progress
        future = _in_thread(function, *args, **kwargs)
        while True:
            left = alive + limit - time.monotonic()
            with contextlib.suppress(concurrent.futures.TimeoutError):
                future.exception(max(0.0, min(left, _LOOK) if progress else left))
            if future.done():
                break
            if time.monotonic() - alive >= limit:
                self._drop()
                raise self._no_answer(what, pool, f"no answer within {limit:g} s")
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, rados.Error | rbd.Error):
            raise self._translated(what, error, pool, needs) from error
        raise error

    def command(self, prefix: str, **arguments: Any) -> Any:
        """Ask the monitors; their JSON answer."""
        connection = self._connected()
        text = json.dumps({"prefix": prefix, "format": "json", **arguments})
        code, out, reason = self.call(
            f"ask for {prefix!r}",
            connection.rados.mon_command,
            text,
            b"",
            timeout=self._connect_timeout,
        )
        if code:
            error = rados.OSError(reason or os.strerror(-code), errno=-code)
            raise self._translated(f"ask for {prefix!r}", error, "", "mon")
        return json.loads(out) if out else None

    def ioctx(self, pool: str, *, freeing: bool = False) -> Any:
        """:param freeing: for work that makes room: a full pool takes it.
        :raises ConfigError: there is no such pool.
        """
        return self._connected().ioctx(pool, freeing)

    def has_pool(self, pool: str) -> bool:
        try:
            self.ioctx(pool)
        except exc.ConfigError:
            return False
        return True

    @contextlib.contextmanager
    def image(
        self,
        pool: str,
        name: str | None = None,
        *,
        image_id: str | None = None,
        read_only: bool = False,
        freeing: bool = False,
    ) -> Iterator[Image]:
        """An open image. One that is only read is opened so that no watch is left.

        :raises ObjectMissing:
        """
        label = f"{pool}/{name or image_id}"
        handle = self.call(
            f"open image {label}",
            rbd.Image,
            self.ioctx(pool, freeing=freeing),
            name,
            read_only=read_only,
            image_id=image_id,
            pool=pool,
            needs=_OPEN,
        )
        try:
            yield Image(self, handle, pool, label)
        finally:
            self.call(f"close image {label}", handle.close, pool=pool)

    # --- the connection ----------------------------------------------------------

    def _connected(self) -> _Connection:
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            return self._connection

    def _connect(self) -> _Connection:
        future = _in_thread(
            _Connection, self.conf_file, self.user, self._connect_timeout, self
        )
        limit = self._connect_timeout + 2
        who = f"Ceph of {self.conf_file} as client.{self.user}"
        try:
            return future.result(limit)
        except concurrent.futures.TimeoutError:
            raise exc.StorageUnavailable(
                f"backend {self.backend!r}: {who} does not answer within {limit} s",
                backend=self.backend,
            ) from None
        except (rados.Error, rbd.Error) as error:
            code = getattr(error, "errno", None)
            if code in (errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EHOSTUNREACH):
                raise exc.StorageUnavailable(
                    f"backend {self.backend!r}: {who} does not answer: {error}",
                    backend=self.backend,
                ) from error
            raise exc.ConfigError(
                f"backend {self.backend!r}: cannot connect to {who}: {error}: are "
                f"[{self.backend}] ceph_conf and user right, can this process read the "
                f"user's keyring, and has the user the cap mon 'profile rbd'?",
                backend=self.backend,
            ) from error

    def close(self) -> None:
        """End the connection; the next call makes a new one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            # One that does not answer is not waited for.
            with contextlib.suppress(concurrent.futures.TimeoutError):
                _in_thread(connection.close).exception(self._connect_timeout)

    def _drop(self) -> None:
        """Leave a connection behind that does not answer."""
        with self._lock:
            self._connection = None

    # --- errors --------------------------------------------------------------------

    def _no_answer(self, what: str, pool: str, reason: str) -> exc.ImageBackendError:
        full = self._full(pool)
        if full:
            return exc.StorageFull(
                f"backend {self.backend!r}: cannot {what}: {full}",
                backend=self.backend,
                pool=pool,
            )
        return exc.StorageUnavailable(
            f"backend {self.backend!r}: cannot {what}: {reason}: are the cluster's "
            f"OSDs up?",
            backend=self.backend,
        )

    def _full(self, pool: str) -> str:
        """What a cluster that has no room makes its clients do is wait."""
        if not pool:
            return ""
        with contextlib.suppress(exc.ImageBackendError, LookupError):
            for each in self.command("osd dump")["pools"]:
                flags = each["flags_names"].split(",")
                if each["pool_name"] == pool and "full" in flags:
                    quota = " has reached its quota" if "full_quota" in flags else ""
                    return f"pool {pool}{quota or ' is full'}"
        return ""

    def _translated(
        self, what: str, error: Any, pool: str, needs: str
    ) -> exc.ImageBackendError:
        code = getattr(error, "errno", None)
        reason = str(error)
        text = f"backend {self.backend!r}: cannot {what}: {reason}"
        values = {"backend": self.backend, "errno": code}
        if code == errno.ENOENT:
            return exc.ObjectMissing(text, **values)
        if code == errno.EEXIST:
            return exc.ObjectExists(text, **values)
        if code in (errno.EBUSY, errno.ENOTEMPTY):
            return exc.Busy(text, **values)
        if code == errno.EROFS:
            # What librbd says when the owner of the exclusive lock keeps it.
            return exc.Busy(f"{text}: another client has locked it", **values)
        if code in (errno.EPERM, errno.EACCES):
            return exc.ConfigError(f"{text}: {self._cap(pool, needs)}", **values)
        if code in (errno.ENOSPC, errno.EDQUOT):
            full = self._full(pool) or "it is full"
            return exc.StorageFull(f"{text}: {full}", **values)
        if code == errno.ETIMEDOUT:
            return self._no_answer(what, pool, reason)
        if code in (errno.ESHUTDOWN, errno.ENOTCONN):
            # Cut off by somebody (a blocklist), or closed: a new one may do.
            self._drop()
            return exc.StorageUnavailable(
                f"{text}: the cluster has cut this client off", **values
            )
        return exc.StorageError(text, **values)

    def _cap(self, pool: str, needs: str) -> str:
        user = f"client.{self.user}"
        if needs == "mon":
            return f"{user} needs the cap mon 'profile rbd'"
        cap = WRITE if needs == _OPEN else needs
        text = f"{user} needs the caps mon 'profile rbd', osd '{cap} pool={pool}'"
        if needs == _OPEN:
            text += (
                f", and, if the image is a clone, osd '{READ}' for the pool of what it "
                f"was cloned from"
            )
        return text


class _Connection:
    """A live connection; made in the thread that may have to wait for it."""

    def __init__(
        self, conf_file: str, user: str, connect_timeout: int, cluster: Cluster
    ) -> None:
        self._cluster = cluster
        if not os.path.exists(conf_file):
            raise rados.OSError(f"{conf_file} is not there", errno=errno.ENOENT)
        self.rados = rados.Rados(conffile=conf_file, rados_id=user)
        timeout = str(cluster.operation_timeout)
        for option, value in {
            "client_mount_timeout": str(connect_timeout),
            "rados_mon_op_timeout": str(connect_timeout),
            "rados_osd_op_timeout": timeout,
            # What it has to say comes to us as errors.
            "log_to_stderr": "false",
            "err_to_stderr": "false",
        }.items():
            self.rados.conf_set(option, value)
        self.rados.connect(timeout=connect_timeout)
        self.fsid: str = self.rados.get_fsid()
        self._pools: dict[tuple[str, bool], Any] = {}
        self._lock = threading.Lock()

    def ioctx(self, pool: str, freeing: bool) -> Any:
        key = (pool, freeing)
        with self._lock:
            if key not in self._pools:
                try:
                    ioctx = self.rados.open_ioctx(pool)
                except rados.ObjectNotFound:
                    raise exc.ConfigError(
                        f"backend {self._cluster.backend!r}: Ceph cluster {self.fsid} "
                        f"has no pool {pool!r}: create it, or change "
                        f"[{self._cluster.backend}] pools",
                        backend=self._cluster.backend,
                        pool=pool,
                    ) from None
                if freeing:
                    ioctx.set_osdmap_full_try()
                self._pools[key] = ioctx
            return self._pools[key]

    def close(self) -> None:
        with self._lock:
            pools, self._pools = self._pools, {}
        for ioctx in pools.values():
            ioctx.close()
        self.rados.shutdown()


class Image:
    """An open image, each call with its deadline."""

    def __init__(self, cluster: Cluster, handle: Any, pool: str, label: str) -> None:
        self._cluster = cluster
        self._handle = handle
        self._pool = pool
        self.label = label

    def do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call librbd's method of that name; an iterator comes back as a list."""
        options = {
            key: kwargs.pop(key)
            for key in ("progress", "timeout", "needs")
            if key in kwargs
        }
        method = getattr(self._handle, verb)

        def work(*a: Any, **k: Any) -> Any:
            result = method(*a, **k)
            # librbd's iterators ask the cluster as they go.
            lazy = type(result).__name__.endswith("Iterator")
            return list(result) if lazy else result

        return self._cluster.call(
            f"{verb} of image {self.label}",
            work,
            *args,
            pool=self._pool,
            **options,
            **kwargs,
        )

    def metadata(self, key: str) -> str | None:
        try:
            value: str = self.do("metadata_get", key)
        except KeyError:
            return None
        return value

    def has_parent(self) -> bool:
        try:
            self.do("parent_info")
        except exc.ObjectMissing:
            return False
        return True

    def watchers(self) -> list[str]:
        """Addresses of the clients that have it open, without this one."""
        return sorted({each["addr"] for each in self.do("watchers_list")})

    def snapshots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.do("list_snaps")
        return found


def _in_thread(
    function: Callable[..., T], *args: Any, **kwargs: Any
) -> concurrent.futures.Future[T]:
    """Start it in a thread that nobody has to wait for, not even at exit."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="ceph", daemon=True).start()
    return future
