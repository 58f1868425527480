# SPDX-License-Identifier: Apache-2.0
"""This host's cache of images: fetched once, checked, durable, shared by all.

A folder for each entry, named by the image's id and version::

    <cache>/<image>-<version>/base.raw      the content, or base.qcow2
    <cache>/<image>-<version>/meta.json     size and digest that it must have
    <cache>/<image>-<version>/lease.<host>  that host uses it, or did
    <cache>/hosts/<host>                    hosts that share the folder
    <cache>/locks/<00..63>                  locks, by hash of the entry's name
    <cache>/tmp/                            what is being fetched, written or removed

Who uses an entry holds its lock shared; who makes or removes it, alone. An entry
appears by one rename, after all of it was flushed. Each use leaves a lease, durable
before the first overlay is; an entry goes only when this host's rows do not need it
and no other host has a lease on it. A host that prunes gives up its own lease on what
it does not need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import tenacity
from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.host import Host
from imagebackend.images import fetch
from imagebackend.images.base import ImageSource
from imagebackend.local_files import digest_of, fsync_path
from imagebackend.model import (
    CachedImage,
    Finding,
    ImageInfo,
    MiB,
    Progress,
    ProgressCallback,
    Severity,
)

LOG = log.getLogger(__name__)

_STRIPES = 64
_OWN = frozenset({"hosts", "locks", "tmp"})
_DIGEST = re.compile(r"(?:blocks-sha256|sha256|sha384|sha512):[0-9a-fA-F]+")
_ENTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{16}")
_LEASE = "lease."
_META = "meta.json"
_FILES = {"raw": "base.raw", "qcow2": "base.qcow2"}


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry as it stands.

    :ivar allocated: bytes that it takes up.
    :ivar last_used: seconds since the epoch, over all hosts.
    :ivar leases: ids of the hosts that use it, or did.
    :ivar broken: what is wrong with it; empty if nothing is.
    """

    entry: str
    image_id: str
    format: str
    virtual_size: int
    allocated: int
    last_used: float
    leases: tuple[str, ...]
    broken: str = ""


@dataclass(frozen=True, slots=True)
class _Meta:
    """What an entry was when it was made."""

    image_id: str
    version: str
    file: str
    format: str
    size: int
    virtual_size: int
    digest: str


class ImageCache:
    """The cache. Keeps its arguments, makes its folders when it first fetches.

    :param in_use: entries that this host's disks go on needing, those that are being
        made as well; asked with the entry's lock held.
    :param based: the same, but only of disks that have something on the entry
        already: they alone keep a damaged one from being fetched anew. Unset: all.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        host: Host,
        in_use: Callable[[], Collection[str]],
        based: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._conf = conf
        self._host = host
        self._in_use = in_use
        self._based = based or in_use

    @property
    def path(self) -> str:
        configured = self._conf.imagebackend_images.cache_path
        return os.path.abspath(
            configured or os.path.join(self._host.state_path, "cache")
        )

    def entry_name(self, info: ImageInfo) -> str:
        """The entry that holds this version of the image."""
        version = hashlib.sha256(info.version.encode()).hexdigest()[:16]
        return f"{info.id}-{version}"

    # --- use -----------------------------------------------------------------

    @contextlib.contextmanager
    def use(
        self,
        source: ImageSource,
        info: ImageInfo,
        *,
        limit: int,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> Iterator[CachedImage]:
        """The image, fetched if it is not there; stays for the block.

        :param limit: bytes of content at most.
        :raises SizeRefused: it is larger. :raises ImageRejected:
        :raises IntegrityError: its bytes are not what they should be.
        """
        entry = self.entry_name(info)
        with contextlib.ExitStack() as held:
            while True:
                held.enter_context(self._locked(entry, shared=True))
                found = self._ready(entry, progress)
                if found is not None:
                    break
                held.close()
                self._fetch_once(source, info, limit, auth, progress)
            if found.virtual_size > limit:
                raise fetch.too_large(info, found.virtual_size, limit)
            yield found

    def lookup(self, entry: str) -> CachedImage | None:
        """The entry as its own notes have it; None: not there, or not readable."""
        try:
            meta = self._meta(entry)
        except exc.IntegrityError:
            return None
        if meta is None:
            return None
        return CachedImage(
            entry, self._path(entry, meta.file), meta.format, meta.virtual_size
        )

    def must_have(self, entry: str) -> None:
        """A look at what a disk is based on, which reads none of its bytes.

        :raises IntegrityError: it is not there, or can be seen to be damaged.
        """
        meta = self._meta(entry)
        if meta is None:
            raise _damaged(entry, f"{self._path(entry, _META)} is not there")
        self._looked_at(entry, meta)

    def prefetch(
        self,
        source: ImageSource,
        info: ImageInfo,
        *,
        limit: int,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> CachedImage:
        """Fetch the image before it is needed."""
        with self.use(
            source, info, limit=limit, auth=auth, progress=progress
        ) as cached:
            return cached

    def _ready(
        self, entry: str, progress: ProgressCallback | None
    ) -> CachedImage | None:
        """The entry, leased to this host; None: it is to be fetched (again)."""
        try:
            meta = self._meta(entry)
            if meta is None:
                return None
            self._lease(entry, meta, progress)
        except exc.IntegrityError:
            if self.needed(entry):
                raise
            LOG.warning("image cache: %s is damaged and is fetched anew", entry)
            return None
        return CachedImage(
            entry, self._path(entry, meta.file), meta.format, meta.virtual_size
        )

    # --- leases --------------------------------------------------------------

    def _lease(
        self, entry: str, meta: _Meta, progress: ProgressCallback | None
    ) -> None:
        """Note that this host uses the entry; look at its bytes once a boot.

        A host that lost power may have lost what it had written: then right name and
        size prove nothing.
        """
        path = self._path(entry, _LEASE + self._host.id)
        says = self._looked_at(entry, meta)
        if _read_json(path) == says:
            with _writing(path), contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return
        self._verify(entry, meta, progress)
        self._register_host()
        with _writing(path):
            self._write_durably(entry, path, says)

    def _looked_at(self, entry: str, meta: _Meta) -> dict[str, Any]:
        """What a lease says of the file whose bytes were right."""
        path = self._path(entry, meta.file)
        try:
            facts = os.lstat(path)
        except OSError as error:
            raise _damaged(entry, f"{meta.file}: {error.strerror}") from error
        if not stat.S_ISREG(facts.st_mode):
            raise _damaged(entry, f"{meta.file} is not a file")
        _check_size(entry, meta, facts)
        return {"boot": self._host.boot_id, "file": _fingerprint(facts)}

    def _verify(
        self, entry: str, meta: _Meta, progress: ProgressCallback | None
    ) -> None:
        base = self._path(entry, meta.file)

        def seen(done: int) -> None:
            if progress is not None:
                progress(Progress("verify image", done, meta.size))

        try:
            _check_size(entry, meta, os.stat(base))
            digest = digest_of(base, meta.digest.partition(":")[0], seen)
        except OSError as error:
            raise _damaged(entry, f"{meta.file}: {error.strerror}") from error
        if digest != meta.digest.lower():
            raise _damaged(entry, f"the bytes of {meta.file} are not those fetched")

    def needed(self, entry: str) -> bool:
        """Whether a disk of this host, or maybe of another one, is based on it."""
        others = [host for host in self._leases(entry) if host != self._host.id]
        return entry in self._based() or bool(others)

    def _leases(self, entry: str) -> dict[str, float]:
        """Hosts that use the entry, or did, and when last."""
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for each in os.scandir(self._path(entry)):
                if each.name.startswith(_LEASE):
                    with contextlib.suppress(FileNotFoundError):
                        host = each.name.removeprefix(_LEASE)
                        found[host] = each.stat(follow_symlinks=False).st_mtime
        return found

    # --- fetch ---------------------------------------------------------------

    def _fetch_once(
        self,
        source: ImageSource,
        info: ImageInfo,
        limit: int,
        auth: Any,
        progress: ProgressCallback | None,
    ) -> None:
        """Whoever gets the lock fetches; the others find the entry there."""
        entry = self.entry_name(info)
        self._register_host()
        with self._locked(entry, shared=False):
            if self._present(entry):
                return
            for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(
                    (exc.IntegrityError, exc.StorageUnavailable)
                ),
                stop=tenacity.stop_after_attempt(
                    self._conf.imagebackend_images.num_retries + 1
                ),
                wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
                reraise=True,
            ):
                with attempt:
                    self._fetch(source, info, limit, auth, progress)

    def _present(self, entry: str) -> bool:
        """Whether a good entry is there; a bad one that nobody needs is removed."""
        if not os.path.lexists(self._path(entry)):
            return False
        if not self._is_entry(entry):
            raise exc.ObjectExists(
                f"image cache: {self._path(entry)} is in the way, and is not the "
                f"cache's own: look what it is",
                entry=entry,
            )
        try:
            meta = self._meta(entry)
            if meta is None:
                raise _damaged(entry, f"it has no {_META}")
            self._verify(entry, meta, None)
        except exc.IntegrityError:
            if self.needed(entry):
                raise
            with _writing(self._path(entry)):
                self._remove(entry)
            return False
        return True

    def _fetch(
        self,
        source: ImageSource,
        info: ImageInfo,
        limit: int,
        auth: Any,
        progress: ProgressCallback | None,
    ) -> None:
        entry = self.entry_name(info)
        folder = os.path.join(self.path, "tmp", f"{entry}.{uuid.uuid4()}")
        try:
            os.makedirs(folder, mode=0o711)
            base = fetch.fetch(
                self._conf,
                source,
                info,
                folder,
                limit=limit,
                auth=auth,
                progress=progress,
            )
            path = os.path.join(folder, base.file)
            # QEMU reads it as another user.
            os.chmod(path, 0o644)
            meta = _Meta(
                image_id=info.id,
                version=info.version,
                file=base.file,
                format=base.format,
                size=os.stat(path).st_size,
                virtual_size=base.virtual_size,
                digest=base.digest,
            )
            fsync_path(path)
            self._write_durably(
                entry, os.path.join(folder, _META), dataclasses.asdict(meta)
            )
            self._first_lease(entry, folder, path)
            os.rename(folder, self._path(entry))
            fsync_path(self.path)
        except OSError as error:
            raise processes.space_error(error, folder) from error
        finally:
            _discard(folder)

    def _first_lease(self, entry: str, folder: str, base: str) -> None:
        """The bytes that were just written and flushed need no second look."""
        says = {
            "boot": self._host.boot_id,
            "file": _fingerprint(os.stat(base)),
        }
        self._write_durably(entry, os.path.join(folder, _LEASE + self._host.id), says)

    def _register_host(self) -> None:
        path = os.path.join(self.path, "hosts", self._host.id)
        with _writing(self.path):
            for name in ("hosts", "locks", "tmp"):
                self._folder(name)
            if os.path.exists(path):
                return
            # Disks are based on what is in the folder: it must outlive a power cut.
            fsync_path(self.path)
            fsync_path(os.path.dirname(self.path))
        with self._locked("hosts", shared=True), _writing(path):
            self._write_durably("hosts", path, {"hostname": self._host.hostname})

    # --- what there is ---------------------------------------------------------

    def entries(self, *, verify: bool = False) -> Iterator[CacheEntry]:
        """All entries.

        Of those that changed since they were last looked at every byte is read.

        :param verify: and of those that were not looked at since this host started.
        """
        for name in self._names():
            if self._is_entry(name):
                yield self._entry(name, verify)

    def strangers(self) -> list[str]:
        """What is in the folder and is not the cache's: it is never touched."""
        return [name for name in self._names() if not self._is_entry(name)]

    def usage(self) -> int:
        """Bytes that the cache takes up, with what is being fetched; 0 without one."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    facts = os.lstat(os.path.join(folder, name))
                    total += facts.st_blocks * 512
        return total

    def hosts(self) -> list[str]:
        """Ids of the hosts that share the cache."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(os.path.join(self.path, "hosts")))
        return []

    def forget_host(self, host_id: str) -> None:
        """Drop a host that is gone for good, and its leases: its word counts no more.

        :raises InvalidValue: no such host, or it is this one.
        """
        if host_id == self._host.id or host_id not in self.hosts():
            others = [host for host in self.hosts() if host != self._host.id]
            raise exc.InvalidValue(
                "host to forget",
                host_id,
                "another one that shares the cache: " + (", ".join(others) or "none"),
            )
        for name in filter(self._is_entry, self._names()):
            _unlink(self._path(name, _LEASE + host_id))
        _unlink(os.path.join(self.path, "hosts", host_id))

    def _is_entry(self, name: str) -> bool:
        path = self._path(name)
        return (
            _ENTRY.fullmatch(name) is not None
            and os.path.isdir(path)
            and not os.path.islink(path)
        )

    def _names(self) -> list[str]:
        try:
            return sorted(set(os.listdir(self.path)) - _OWN)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise exc.HostError(
                f"cannot list the image cache {self.path}: {error.strerror}",
                path=self.path,
            ) from error

    def _entry(self, name: str, verify: bool) -> CacheEntry:
        leases = self._leases(name)
        meta, broken = None, ""
        try:
            meta = self._meta(name)
            if meta is None:
                broken = f"it has no {_META}"
            else:
                self._verify_changed(name, meta, verify)
        except exc.IntegrityError as error:
            # One that went meanwhile is not a damaged one.
            if os.path.isdir(self._path(name)):
                broken = error.message
        allocated = 0
        for folder, _, files in os.walk(self._path(name)):
            for each in files:
                with contextlib.suppress(FileNotFoundError):
                    facts = os.lstat(os.path.join(folder, each))
                    allocated += facts.st_blocks * 512
        return CacheEntry(
            entry=name,
            image_id=meta.image_id if meta else name.rpartition("-")[0],
            format=meta.format if meta else "",
            virtual_size=meta.virtual_size if meta else 0,
            allocated=allocated,
            last_used=max(leases.values(), default=0.0),
            leases=tuple(sorted(leases)),
            broken=broken,
        )

    def _verify_changed(self, name: str, meta: _Meta, after_boot: bool) -> None:
        seen = _read_json(self._path(name, _LEASE + self._host.id))
        now = self._looked_at(name, meta)
        if isinstance(seen, dict) and not after_boot:
            seen = seen | {"boot": now["boot"]}
        # What was never looked at has not changed.
        if seen != now and (after_boot or seen is not None):
            with self._locked(name, shared=True):
                self._verify(name, meta, None)

    def _meta(self, entry: str) -> _Meta | None:
        """:raises IntegrityError: it is there, and not what was written."""
        path = self._path(entry, _META)
        if not os.path.exists(path):
            return None
        says = _read_json(path)
        if not isinstance(says, dict):
            raise _damaged(entry, f"its {_META} cannot be read")
        fields: list[Any] = [says.get(each.name) for each in dataclasses.fields(_Meta)]
        meta = _Meta(*fields)
        sizes = (meta.size, meta.virtual_size)
        if (
            not all(isinstance(each, str) for each in (meta.image_id, meta.version))
            or not isinstance(meta.format, str)
            or meta.file != _FILES.get(meta.format)
            or not all(type(each) is int and each > 0 for each in sizes)
            or not isinstance(meta.digest, str)
            or not _DIGEST.fullmatch(meta.digest)
        ):
            raise _damaged(entry, f"its {_META} is not what was written")
        return meta

    # --- prune -----------------------------------------------------------------

    def prune(self, *, dry_run: bool = False) -> Iterator[Finding]:
        """Remove what nobody needs: damaged entries, those unused for longer than
        ``cache_max_age``, then the least recently used until ``cache_max_mb`` holds.
        """
        options = self._conf.imagebackend_images
        budget = options.cache_max_mb * MiB
        left = self.usage()
        now = time.time()
        for each in sorted(self.entries(), key=lambda entry: entry.last_used):
            old = now - each.last_used > options.cache_max_age
            if not (each.broken or old or (budget and left > budget)):
                if each.entry in self._in_use() or self.needed(each.entry):
                    continue
                each = self._entry(each.entry, verify=True)
                if not each.broken:
                    continue
            why = each.broken or (
                f"not used for {_days(now - each.last_used)}" if old else "over budget"
            )
            finding = self._prune_one(each, why, dry_run)
            if finding.action != "kept":
                left -= each.allocated
            yield finding
        for name in self.strangers():
            yield Finding(
                Severity.WARNING,
                f"image cache: {name}",
                "is not the cache's own",
                "look what it is, and remove it by hand",
                "left as it is",
            )

    def _prune_one(self, each: CacheEntry, why: str, dry_run: bool) -> Finding:
        subject = f"image cache: {each.entry}"
        try:
            with self._locked(each.entry, shared=False, wait=False):
                reason = self._why_kept(each, dry_run)
                if reason:
                    return Finding(
                        Severity.WARNING if each.broken else Severity.OK,
                        subject,
                        f"{why}, but {reason}",
                        action="kept",
                    )
                if not dry_run:
                    self._remove(each.entry)
        except exc.Busy:
            return Finding(Severity.OK, subject, "in use right now", action="kept")
        except OSError as error:
            return Finding(
                Severity.ERROR, subject, f"cannot be removed: {error}", action="kept"
            )
        return Finding(
            Severity.OK,
            subject,
            why,
            action="would be removed" if dry_run else "removed",
        )

    def _why_kept(self, each: CacheEntry, dry_run: bool) -> str:
        """Asked with the lock: what was true before it may be so no more."""
        if each.entry in self._in_use():
            return "a disk of this host is based on it"
        leases = self._leases(each.entry)
        own = leases.pop(self._host.id, 0.0)
        if own > each.last_used:
            return "used just now"
        if leases:
            # Two hosts that wait for each other's lease would wait for ever.
            if own and not dry_run:
                _unlink(self._path(each.entry, _LEASE + self._host.id))
            return f"host {', '.join(sorted(leases))} has a lease on it"
        return ""

    def _remove(self, entry: str) -> None:
        """Out of sight by one rename, then for good."""
        aside = os.path.join(self._folder("tmp"), f"{entry}.{uuid.uuid4()}")
        os.rename(self._path(entry), aside)
        fsync_path(self.path)
        _discard(aside)

    def sweep(self) -> list[str]:
        """Remove what a dead fetch or prune left; returns its names."""
        swept = []
        folder = os.path.join(self.path, "tmp")
        try:
            names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        for name in names:
            entry = name.rpartition(".")[0]
            # Whoever works on an entry holds its lock meanwhile.
            with (
                contextlib.suppress(exc.Busy),
                self._locked(entry, shared=False, wait=False),
            ):
                # It may have come to its end since it was listed.
                if os.path.lexists(os.path.join(folder, name)):
                    _discard(os.path.join(folder, name))
                    swept.append(name)
        return swept

    # --- parts -----------------------------------------------------------------

    def _folder(self, name: str) -> str:
        """A folder of the cache's own, made if need be; QEMU's user may enter it."""
        path = os.path.join(self.path, name)
        for each in (self.path, path):
            os.makedirs(each, mode=0o711, exist_ok=True)
        return path

    def _path(self, entry: str, *names: str) -> str:
        return os.path.join(self.path, entry, *names)

    @contextlib.contextmanager
    def _locked(self, entry: str, *, shared: bool, wait: bool = True) -> Iterator[None]:
        """A few lock files serve all entries: none is left over by one that went.

        :raises Busy: somebody has it, and ``wait`` is false.
        """
        number = int.from_bytes(hashlib.sha256(entry.encode()).digest()[:4]) % _STRIPES
        path = os.path.join(self.path, "locks", f"{number:02}")
        try:
            self._folder("locks")
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise processes.space_error(error, path) from error
        try:
            mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            try:
                fcntl.flock(fd, mode if wait else mode | fcntl.LOCK_NB)
            except BlockingIOError:
                raise exc.Busy(f"image cache: {entry} is in use", entry=entry) from None
            except OSError as error:
                raise exc.HostError(
                    f"cannot lock {path}: {error.strerror}", path=path
                ) from error
            yield
        finally:
            os.close(fd)

    def _write_durably(self, entry: str, path: str, value: Any) -> None:
        """Whole or not at all. Its caller holds the lock of ``entry``, so that a sweep
        tells a living write from a dead one."""
        part = os.path.join(self.path, "tmp", f"{entry}.{uuid.uuid4()}")
        try:
            with open(part, "x", encoding="utf-8") as file:
                json.dump(value, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, path)
        except BaseException:
            _discard(part)
            raise
        fsync_path(os.path.dirname(path))


def _fingerprint(facts: os.stat_result) -> list[int]:
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


def _read_json(path: str) -> Any:
    """None if it is not there or is not JSON."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    """Failures of the file system in our words."""
    try:
        yield
    except OSError as error:
        raise processes.space_error(error, path) from error


def _discard(path: str) -> None:
    """Whatever it is, without a word if it cannot be."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _unlink(path: str) -> None:
    """:raises HostError:"""
    with _writing(path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _check_size(entry: str, meta: _Meta, facts: os.stat_result) -> None:
    if facts.st_size != meta.size:
        raise _damaged(
            entry, f"{meta.file} has {facts.st_size} bytes instead of {meta.size}"
        )


def _damaged(entry: str, what: str) -> exc.IntegrityError:
    return exc.IntegrityError(f"image cache: {entry} is damaged: {what}", entry=entry)


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds < 1e8 else "ever"
