# SPDX-License-Identifier: Apache-2.0
"""Disks as images in Ceph.

An object is the image ``<disk>.<generation>.<deployment>`` of a pool. The name is the
marker, so a pool is scanned without opening its images; one metadata key, written as
the last step of a create, says that the image is whole.

Content comes by the cheapest way: a clone of a snapshot in the same cluster (Glance's,
or one of a disk's own), else through QEMU, which converts and skips zeros.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import rbd
from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend.backends import generic
from imagebackend.backends.base import (
    Backend,
    Blank,
    Fill,
    FromGeneration,
    FromImage,
    FromSnapshot,
    Record,
)
from imagebackend.backends.ceph import READ, Cluster, Image
from imagebackend.conf import backends as options
from imagebackend.model import (
    Capabilities,
    Connection,
    Connector,
    Creation,
    FileSource,
    Finding,
    Found,
    Generation,
    ImageInfo,
    Inventory,
    Marker,
    Path,
    Placement,
    Progress,
    ProgressCallback,
    Secret,
    Severity,
    Snapshot,
    Source,
    Stat,
    UploadTarget,
    Want,
    Way,
)
from imagebackend.qemu_img import QemuImg

LOG = log.getLogger(__name__)

#: The metadata key that a whole image has.
_MARK = "imagebackend"
#: Names of our snapshots start with it.
_SNAPSHOT = "imagebackend-"
#: What Glance calls the snapshot that an image is cloned from (glance_store's
#: _drivers/rbd.py).
_GLANCE_SNAPSHOT = "snap"
_SECTOR = 512
#: Several clients write to a shareable image: no lock for one of them alone, and
#: nothing that needs it.
_SHAREABLE_FEATURES = rbd.RBD_FEATURE_LAYERING
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 2.0
_SCHEME = "ceph"


@dataclass(frozen=True)
class _Parent:
    """A snapshot that can be cloned."""

    pool: str
    image: str
    snapshot: str


class RbdBackend(Backend):
    """Pools of one Ceph cluster."""

    OPTIONS: ClassVar[Sequence[cfg.Opt]] = options.RBD
    CLONES_IMAGES = True

    def __init__(self, name: str, conf: cfg.ConfigOpts, deployment_id: str) -> None:
        super().__init__(name, conf, deployment_id)
        self._lock = threading.Lock()
        self._made: Cluster | None = None

    @property
    def _cluster(self) -> Cluster:
        with self._lock:
            if self._made is None:
                self._made = Cluster(
                    self.name,
                    self.options.ceph_conf,
                    self.options.user,
                    self.options.connect_timeout,
                    self.options.operation_timeout,
                    os.path.join(self.conf.imagebackend.state_path, "ceph", self.name),
                )
            return self._made

    def close(self) -> None:
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()

    @property
    def lingering(self) -> float:  # type: ignore[override]
        return float(self.options.delete_timeout)

    # --- places --------------------------------------------------------------

    @property
    def _pools(self) -> list[str]:
        pools: list[str] = self.options.pools
        if not pools:
            raise exc.ConfigError(
                f"backend {self.name!r}: [{self.name}] pools is empty: name at least "
                f"one pool",
                backend=self.name,
            )
        return pools

    def check(self) -> Sequence[Finding]:
        try:
            fsid = self._cluster.fsid
        except exc.ImageBackendError as error:
            return [Finding(Severity.ERROR, self.name, error.message)]
        findings = []
        for pool in self._pools:
            try:
                self._check_pool(pool)
            except exc.ImageBackendError as error:
                findings.append(Finding(Severity.ERROR, self.name, error.message))
        findings += self._check_image_pool()
        findings += self._check_blocklist()
        if not findings:
            what = f"disks go to {', '.join(self._pools)} of Ceph cluster {fsid}"
            findings.append(Finding(Severity.OK, self.name, what))
        return findings

    def _check_pool(self, pool: str) -> None:
        """Whether the user may write there, asked by a removal of nothing."""
        with contextlib.suppress(exc.ObjectMissing):
            self._cluster.call(
                f"write to pool {pool}",
                self._cluster.ioctx(pool).remove_object,
                "imagebackend-no-such-object",
                pool=pool,
            )

    def _check_image_pool(self) -> list[Finding]:
        """Without the right to write there, snapshots take another way."""
        pool = self.options.image_pool
        if not pool:
            return []
        try:
            self._check_pool(pool)
        except exc.ImageBackendError as error:
            advice = "without it snapshots are uploaded"
            return [Finding(Severity.WARNING, self.name, error.message, advice)]
        return []

    def _check_blocklist(self) -> list[Finding]:
        """A client that takes over a dead one's image must be allowed to cut it off,
        or the guest finds errors on its disk. Asked with an address that is none."""
        try:
            self._cluster.command(
                "osd blocklist", blocklistop="add", addr="none/1", expire=1.0
            )
        except exc.ConfigError as error:
            return [
                Finding(
                    Severity.ERROR,
                    self.name,
                    f"{error.message}: without it a disk whose host died cannot be "
                    f"opened for writing",
                )
            ]
        except exc.ImageBackendError:
            pass  # allowed, and the address is refused
        return []

    def capabilities(self, at: Placement | Generation) -> Capabilities:
        return Capabilities(
            live_resize=Way.STORAGE,
            live_snapshot=Way.STORAGE,
            shareable=True,
            snapshot=True,
            revert=True,
            flatten=True,
            granularity=_SECTOR,
        )

    def plan(self, want: Want) -> Placement:
        able = ("Blank", "FromImage", "FromGeneration", "FromSnapshot")
        generic.refuse_fills(self.name, want, able)
        if want.volume_type:
            raise exc.PlacementRefused(
                f"backend {self.name!r} has no volume types: {want.volume_type!r} "
                f"cannot be had from it",
                backend=self.name,
            )
        pool = want.pool or self._pools[0]
        if pool not in self._pools:
            raise exc.PlacementRefused(
                f"backend {self.name!r} has no pool {pool!r} for disks: there are "
                f"{', '.join(self._pools)} ([{self.name}] pools)",
                pool=pool,
                accepted=self._pools,
            )
        self._cluster.ioctx(pool)
        if want.fill == "Blank":
            path = Path.BLANK
        elif want.fill == "FromSnapshot" or (
            want.image is not None and self._parent(want.image)
        ):
            path = Path.CLONE
        else:
            path = _way_of(want.image)
        return Placement(
            self.name,
            self._scope(pool),
            -(-want.size // _SECTOR) * _SECTOR,
            "raw",
            path,
            {"pool": pool},
        )

    def _scope(self, pool: str) -> str:
        return f"{_SCHEME}:{self._cluster.fsid}/{pool}"

    def _own(self, gen: Generation) -> tuple[str, str]:
        """The generation's pool and image.

        :raises ConfigError: it was recorded in another cluster.
        """
        pool = str(gen.handle.get("pool") or gen.scope.rpartition("/")[2])
        if gen.scope != self._scope(pool):
            raise exc.ConfigError(
                f"backend {self.name!r}: generation {gen.id} is recorded in "
                f"{gen.scope}, but [{self.name}] ceph_conf leads to cluster "
                f"{self._cluster.fsid}, pool {pool}",
                backend=self.name,
                generation=gen.id,
            )
        name = gen.handle.get("image") or generic.object_name(
            gen.disk_name, _marker(gen)
        )
        return pool, str(name)

    def _parent(self, image: ImageInfo) -> _Parent | None:
        """Where this cluster has the image, as a snapshot. Only raw ones are disks as
        they lie there."""
        if image.disk_format not in ("raw", "iso"):
            return None
        for location in image.locations:
            scheme, _, rest = location.partition("://")
            parts = [urllib.parse.unquote(part) for part in rest.split("/")]
            if scheme == "rbd" and len(parts) == 4 and all(parts):
                fsid, pool, name, snapshot = parts
                if fsid == self._cluster.fsid and self._cluster.has_pool(pool):
                    return _Parent(pool, name, snapshot)
        return None

    # --- create ----------------------------------------------------------------

    def create(
        self, gen: Generation, fill: Fill, record: Record, *, auth: Any = None
    ) -> Creation:
        pool, name = self._own(gen)
        # Recorded before the first effect: from then on what has the name is ours.
        begun = "image" in gen.handle
        handle = {**gen.handle, "pool": pool, "image": name}
        if self._exists(pool, name):
            with self._cluster.image(pool, name, read_only=True) as image:
                mark, size = _mark_of(image), image.do("size")
            if mark.get("generation") == gen.id:
                return Creation(size, "raw", Path(mark["path"]), handle)
            if not begun:
                raise self._foreign(pool, name)
            self._remove(pool, name)  # half of what an earlier try made
        record(handle)
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove, pool, name)
            try:
                path = self._fill(gen, pool, name, fill)
            except exc.ObjectExists:
                undo.pop_all()
                record(gen.handle)
                raise self._foreign(pool, name) from None
            self._finish(gen, pool, name, path)
            undo.pop_all()
        return Creation(gen.size, "raw", path, handle)

    def _exists(self, pool: str, name: str) -> bool:
        """Asked by the one object that every image's name leads to, without opening
        the image (doc/dev/rbd-layering.rst and rbd-diff of Ceph name it)."""
        try:
            self._cluster.call(
                f"look for image {pool}/{name}",
                self._cluster.ioctx(pool).stat,
                f"rbd_id.{name}",
                pool=pool,
            )
        except exc.ObjectMissing:
            return False
        return True

    def _foreign(self, pool: str, name: str) -> exc.ObjectExists:
        return exc.ObjectExists(
            f"backend {self.name!r}: image {pool}/{name} exists and is not the disk "
            f"that was to be made there; it was not touched",
            backend=self.name,
            image=f"{pool}/{name}",
        )

    def _fill(self, gen: Generation, pool: str, name: str, fill: Fill) -> Path:
        match fill:
            case Blank(fs=None):
                self._create(gen, pool, name)
                return Path.BLANK
            case Blank(fs=str() as fs, label=label):
                with self._scratch(gen.size) as path:
                    generic.make_filesystem(path, fs, label)
                    self._copy(gen, pool, name, FileSource(path, "raw"))
                return Path.BLANK
            case FromImage(image):
                parent = self._parent(image.info)
                if parent is not None and self._clone_image(gen, pool, name, parent):
                    return Path.CLONE
                with image.cached() as cached:
                    source = FileSource(cached.path, cached.format)
                    self._copy(gen, pool, name, source)
                return _way_of(image.info)
            case FromGeneration(source=source):
                self._copy(gen, pool, name, source)
                return Path.CONVERT
            case FromSnapshot(of, snapshot):
                of_pool, of_name = self._own(of)
                parent = _Parent(of_pool, of_name, _snapshot_name(snapshot.id))
                self._clone_own(gen, pool, name, parent)
                return Path.CLONE
            case _:
                raise exc.NotSupported(
                    f"backend {self.name!r} cannot fill by {type(fill).__name__}"
                )

    def _create(self, gen: Generation, pool: str, name: str) -> None:
        self._cluster.call(
            f"create image {pool}/{name}",
            rbd.RBD().create,
            self._cluster.ioctx(pool),
            name,
            gen.size,
            pool=pool,
            features=_features(gen),
        )

    def _copy(self, gen: Generation, pool: str, name: str, source: Source) -> None:
        self._create(gen, pool, name)
        QemuImg(self.conf).convert(
            source, self._cluster.source(pool, name), target_is_blank=True
        )

    @contextlib.contextmanager
    def _scratch(self, size: int) -> Iterator[str]:
        """A file of ``size`` zeros without a name, so that nothing is left of it."""
        folder = self.conf.imagebackend.state_path
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.truncate(file.fileno(), size)
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"

    def _clone(self, gen: Generation, pool: str, name: str, parent: _Parent) -> None:
        self._cluster.call(
            f"clone {parent.pool}/{parent.image}@{parent.snapshot} to {pool}/{name}",
            rbd.RBD().clone,
            self._cluster.ioctx(parent.pool),
            parent.image,
            parent.snapshot,
            self._cluster.ioctx(pool),
            name,
            pool=parent.pool,
            needs=READ,
            features=_features(gen),
        )

    def _clone_image(
        self, gen: Generation, pool: str, name: str, parent: _Parent
    ) -> bool:
        """False: it cannot be cloned after all, and another way is allowed."""
        try:
            self._clone(gen, pool, name, parent)
        except (exc.ObjectExists, exc.StorageUnavailable):
            raise
        except (exc.StorageError, exc.ConfigError) as error:
            if self._exists(pool, name):
                self._remove(pool, name)
            if self.conf.imagebackend.slow_path == "refuse":
                raise
            LOG.warning("%s: its bytes are copied instead", error.message)
            return False
        return True

    def _clone_own(
        self, gen: Generation, pool: str, name: str, parent: _Parent
    ) -> None:
        try:
            self._clone(gen, pool, name, parent)
        except exc.StorageError as error:
            if error.values.get("errno") != errno.EINVAL:
                raise
            # A cluster that serves old clients clones only what is protected.
            with self._cluster.image(parent.pool, parent.image) as image:
                image.do("protect_snap", parent.snapshot)
            self._clone(gen, pool, name, parent)

    def _finish(self, gen: Generation, pool: str, name: str, path: Path) -> None:
        """Exact size, then the mark that it is whole."""
        mark = {
            "generation": gen.id,
            "deployment": gen.deployment_id,
            "disk": gen.disk_id,
            "path": str(path),
        }
        ioctx = self._cluster.ioctx(pool)

        def finish() -> None:
            with rbd.Image(ioctx, name) as image:
                if path is Path.CLONE:
                    size = image.size()
                    if size > gen.size:
                        raise exc.SizeRefused(
                            f"backend {self.name!r}: the image has {size} bytes, more "
                            f"than the disk's {gen.size}",
                            size=gen.size,
                            needed=size,
                        )
                    if size < gen.size:
                        image.resize(gen.size)
                image.metadata_set(_MARK, json.dumps(mark, sort_keys=True))

        # One call: with many creates at once, each change of threads counts.
        self._cluster.call(f"finish image {pool}/{name}", finish, pool=pool)

    # --- delete ----------------------------------------------------------------

    def delete(self, gen: Generation) -> None:
        pool, name = self._own(gen)
        if "image" not in gen.handle:
            # Nothing was begun by this row: only a whole image of ours can be there.
            if not self._exists(pool, name):
                return
            with self._cluster.image(pool, name, read_only=True) as image:
                mark = _mark_of(image)
            if mark.get("generation") != gen.id:
                return
        self._remove(pool, name)

    def _remove(self, pool: str, name: str) -> None:
        """Remove an image of ours, whole or half, in its place or in the trash.

        :raises Busy, Debt:
        """
        deadline = time.monotonic() + self.options.delete_timeout
        pause = _FIRST_PAUSE
        while True:
            try:
                with self._cluster.image(pool, name, read_only=True) as image:
                    users, snapshots = image.watchers(), image.snapshots()
            except exc.ObjectMissing:
                users, snapshots = [], []
            if not users:
                break
            if time.monotonic() >= deadline:
                raise exc.Busy(
                    f"image {pool}/{name} is still open by client "
                    f"{', '.join(users)}, after {self.options.delete_timeout} s "
                    f"([{self.name}] delete_timeout): is a guest running on it?",
                    image=f"{pool}/{name}",
                    clients=users,
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
        if snapshots and not self._drop_snapshots(pool, name):
            self._to_trash(pool, name)
        else:
            self._remove_now(pool, name)
        self._empty_trash(pool, name)

    def _remove_now(self, pool: str, name: str) -> None:
        """Also of one whose removal was begun and whose header is gone already."""
        try:
            self._cluster.call(
                f"remove image {pool}/{name}",
                rbd.RBD().remove,
                self._cluster.ioctx(pool, freeing=True),
                name,
                pool=pool,
                progress=True,
            )
        except exc.ObjectMissing:
            pass
        except exc.ConfigError:
            # A user that may not write was not able to make it either.
            if self._exists(pool, name):
                raise

    def _drop_snapshots(self, pool: str, name: str) -> bool:
        """Remove our snapshots; False if clones hang on one.

        :raises Busy: there are snapshots of somebody else's.
        """
        with self._cluster.image(pool, name, freeing=True) as image:
            return self._drop_snapshots_of(image)

    def _drop_snapshots_of(self, image: Image) -> bool:
        free = True
        for each in image.snapshots():
            if each["namespace"] == rbd.RBD_SNAP_NAMESPACE_TYPE_TRASH:
                free = False
                continue
            if not each["name"].startswith(_SNAPSHOT):
                raise exc.Busy(
                    f"image {image.label} has snapshot {each['name']!r}, which is not "
                    f"ours: remove it first",
                    image=image.label,
                    snapshot=each["name"],
                )
            free = self._drop_snapshot(image, each["name"]) and free
        # A snapshot with clones is moved out of sight where the cluster can do that.
        return free and not image.snapshots()

    def _drop_snapshot(self, image: Image, name: str) -> bool:
        """False: it is protected, and clones hang on it."""
        try:
            if image.do("is_protected_snap", name):
                image.do("unprotect_snap", name)
            image.do("remove_snap", name)
        except exc.ObjectMissing:
            return True
        except exc.Busy:
            return False
        return True

    def _to_trash(self, pool: str, name: str) -> None:
        with contextlib.suppress(exc.ObjectMissing):
            self._cluster.call(
                f"move image {pool}/{name} to the trash",
                rbd.RBD().trash_move,
                self._cluster.ioctx(pool, freeing=True),
                name,
                0,
                pool=pool,
            )

    def _trash(self, pool: str) -> list[Mapping[str, Any]]:
        ioctx = self._cluster.ioctx(pool)

        def entries() -> list[Mapping[str, Any]]:
            return list(rbd.RBD().trash_list(ioctx))

        return self._cluster.call(f"list the trash of {pool}", entries, pool=pool)

    def _empty_trash(self, pool: str, name: str) -> None:
        """Purge what we have in the trash by that name, and nothing else of it.

        :raises Debt: something hangs on it still.
        """
        for entry in self._trash(pool):
            if entry["name"] == name:
                try:
                    self._purge(pool, name, entry["id"])
                except exc.Busy as error:
                    raise exc.Debt(
                        f"image {pool}/{name} is in the trash as {entry['id']} and "
                        f"cannot be purged yet: {error.message}",
                        image=f"{pool}/{name}",
                        trash=entry["id"],
                    ) from error

    def _purge(self, pool: str, name: str, image_id: str) -> None:
        with contextlib.suppress(exc.ObjectMissing):
            with self._cluster.image(pool, image_id=image_id, freeing=True) as image:
                if image.snapshots():
                    children = image.do("list_children2")
                    for child in children:
                        self._flatten_child(child)
                    if not self._drop_snapshots_of(image):
                        raise exc.Busy(
                            "clones hang on it: "
                            + ", ".join(_child_name(each) for each in children)
                        )
            self._cluster.call(
                f"purge image {pool}/{name} ({image_id}) from the trash",
                rbd.RBD().trash_remove,
                self._cluster.ioctx(pool, freeing=True),
                image_id,
                pool=pool,
                progress=True,
            )

    def _flatten_child(self, child: Mapping[str, Any]) -> None:
        """Give a clone that is a disk of ours its own copy of what it shares with a
        parent that is to go. Of others only their owners know."""
        marker = generic.marker_of(child["image"])
        if marker is None or marker.deployment_id != self.deployment_id:
            return
        where = {"image_id": child["id"]} if child["trash"] else {}
        with contextlib.suppress(exc.ObjectMissing):
            name = None if where else child["image"]
            with self._cluster.image(child["pool"], name, **where) as image:
                LOG.info("flattening %s: its parent goes", image.label)
                self._flatten(image)

    # --- connect -----------------------------------------------------------------

    def connect(
        self,
        gen: Generation,
        to: Connector,
        record: Record,
        *,
        readonly: bool = False,
    ) -> Connection:
        pool, name = self._own(gen)
        if not self._exists(pool, name):
            raise self._missing(gen, pool, name)
        record({})
        source = self._cluster.source(pool, name, self.options.secret_uuid)
        return Connection(source, to.host_id, readonly=readonly)

    def disconnect(self, gen: Generation, conn: Connection) -> None:
        self._own(gen)

    def secrets(self, gen: Generation, conn: Connection) -> Sequence[Secret]:
        if self.options.secret_uuid:
            return ()  # the operator's own
        return (self._cluster.secret(),)

    def _missing(self, gen: Generation, pool: str, name: str) -> exc.ObjectMissing:
        text = f"backend {self.name!r}: the disk's image {pool}/{name} is gone"
        for entry in self._trash(pool):
            if entry["name"] == name:
                text += (
                    f": it is in the trash: rbd trash restore -p {pool} {entry['id']}"
                )
        return exc.ObjectMissing(text, backend=self.name, generation=gen.id)

    # --- what there is -------------------------------------------------------------

    def stat(self, gen: Generation) -> Stat | None:
        pool, name = self._own(gen)
        try:
            with self._cluster.image(pool, name, read_only=True) as image:
                users = [f"client {each}" for each in image.watchers()]
                size = image.do("size")
        except exc.ObjectMissing:
            return None
        if size < gen.size:
            raise exc.IntegrityError(
                f"backend {self.name!r}: the disk's image {pool}/{name} is damaged: it "
                f"has {size} bytes, recorded are {gen.size}",
                backend=self.name,
                generation=gen.id,
                used_by=users,
            )
        return Stat(size, used_by=tuple(users))

    def scan(self) -> Iterator[Found]:
        for pool in self._pools:
            ioctx = self._cluster.ioctx(pool)

            def names(ioctx: Any = ioctx) -> list[str]:
                return [each["name"] for each in rbd.RBD().list2(ioctx)]

            for name in self._cluster.call(f"list pool {pool}", names, pool=pool):
                handle = {"pool": pool, "image": name}
                yield Found(f"{pool}/{name}", generic.marker_of(name), handle)
            for entry in self._trash(pool):
                marker = generic.marker_of(entry["name"])
                # What others keep in the trash is no concern of ours.
                if marker is not None:
                    yield Found(
                        f"{pool}/{entry['name']} (trash {entry['id']})",
                        marker,
                        {"pool": pool, "image": entry["name"]},
                    )

    def capacity(self) -> Sequence[Inventory]:
        stats = {
            each["name"]: each["stats"]
            for each in self._cluster.command("df", detail="detail")["pools"]
        }
        found = []
        for pool in self._pools:
            self._cluster.ioctx(pool)
            if pool not in stats:
                raise exc.StorageUnavailable(
                    f"backend {self.name!r}: the cluster has no figures of pool "
                    f"{pool} yet: does a ceph-mgr run?",
                    backend=self.name,
                )
            facts = stats[pool]
            total = facts["stored"] + facts["max_avail"]
            if facts["quota_bytes"]:
                total = min(total, facts["quota_bytes"])
            free = max(0, min(facts["max_avail"], total - facts["stored"]))
            found.append(
                Inventory(self.name, self._scope(pool), total, free, used_by_us=None)
            )
        return found

    # --- optional --------------------------------------------------------------------

    def resize(self, gen: Generation, size: int) -> int:
        pool, name = self._own(gen)
        wanted = -(-size // _SECTOR) * _SECTOR
        try:
            with self._cluster.image(pool, name) as image:
                present: int = image.do("size")
                if present >= wanted:
                    return present
                image.do("resize", wanted)
                grown: int = image.do("size")
                return grown
        except exc.ObjectMissing:
            raise self._missing(gen, pool, name) from None

    def snapshot(self, gen: Generation, snap_id: str, record: Record) -> Snapshot:
        pool, name = self._own(gen)
        snapshot = _snapshot_name(snap_id)
        record({"snapshot": snapshot})
        with self._cluster.image(pool, name) as image:
            with contextlib.suppress(exc.ObjectExists):
                image.do("create_snap", snapshot)
            (size,) = (
                each["size"] for each in image.snapshots() if each["name"] == snapshot
            )
        return Snapshot(snap_id, gen.id, size, {"snapshot": snapshot})

    def delete_snapshot(self, gen: Generation, snap: Snapshot) -> None:
        pool, name = self._own(gen)
        with (
            contextlib.suppress(exc.ObjectMissing),
            self._cluster.image(pool, name) as image,
        ):
            if not self._drop_snapshot(image, _snapshot_name(snap.id)):
                raise exc.Busy(
                    f"snapshot {snap.id} of image {pool}/{name} has clones: delete or "
                    f"flatten them first",
                    snapshot=snap.id,
                )

    def flatten(
        self, gen: Generation, *, progress: ProgressCallback | None = None
    ) -> None:
        pool, name = self._own(gen)
        try:
            with self._cluster.image(pool, name) as image:
                self._flatten(image, progress)
        except exc.ObjectMissing:
            raise self._missing(gen, pool, name) from None

    def _flatten(self, image: Image, progress: ProgressCallback | None = None) -> None:
        if not image.has_parent():
            return

        def seen(done: int, total: int) -> None:
            if progress is not None:
                progress(Progress("flatten", done, total))

        image.do("flatten", progress=seen)

    # --- snapshots as images -----------------------------------------------------

    def publish(
        self, gen: Generation, snap: Snapshot, into: UploadTarget
    ) -> str | None:
        target = self.options.image_pool
        if not target or into.disk_format != "raw":
            return None
        pool, name = self._own(gen)
        parent = _Parent(pool, name, _snapshot_name(snap.id))
        if self._exists(target, into.image):
            raise self._foreign(target, into.image)
        try:
            self._check_pool(target)
            self._clone_own(gen, target, into.image, parent)
        except exc.ConfigError as error:
            if self.conf.imagebackend.slow_path == "refuse":
                raise
            LOG.warning("%s: the snapshot is uploaded instead", error.message)
            return None
        with self._cluster.image(target, into.image) as image:
            image.do("metadata_set", _MARK, json.dumps({"published": into.image}))
            # Glance's images stand alone, and have a protected snapshot of this name.
            self._flatten(image)
            image.do("create_snap", _GLANCE_SNAPSHOT)
            image.do("protect_snap", _GLANCE_SNAPSHOT)
        return f"rbd://{self._cluster.fsid}/{target}/{into.image}/{_GLANCE_SNAPSHOT}"

    def withdraw(self, gen: Generation, snap: Snapshot, into: UploadTarget) -> None:
        target = self.options.image_pool
        if not target or not self._exists(target, into.image):
            return
        try:
            with self._cluster.image(target, into.image) as image:
                mark = _mark_of(image)
                # A clone has its parent's mark, until it gets its own.
                if into.image != mark.get("published") and gen.id != mark.get(
                    "generation"
                ):
                    return
                for each in image.snapshots():
                    if image.do("is_protected_snap", each["name"]):
                        image.do("unprotect_snap", each["name"])
                    image.do("remove_snap", each["name"])
        except exc.ObjectMissing:
            LOG.info("half of image %s/%s is removed", target, into.image)
        self._remove_now(target, into.image)

    def revert(self, gen: Generation, snap: Snapshot) -> None:
        pool, name = self._own(gen)
        with self._cluster.image(pool, name) as image:
            image.do(
                "rollback_to_snap",
                _snapshot_name(snap.id),
                timeout=self.options.rollback_timeout,
            )


def _marker(gen: Generation) -> Marker:
    return Marker(gen.id, gen.deployment_id)


def _mark_of(image: Image) -> dict[str, str]:
    """What the mark of an image says; empty if it has none, or not one of ours."""
    with contextlib.suppress(ValueError):
        mark = json.loads(image.metadata(_MARK) or "{}")
        if isinstance(mark, dict):
            return mark
    return {}


def _way_of(image: ImageInfo | None) -> Path:
    """How it comes where it cannot be cloned; converted in the cache is converted."""
    raw = image is not None and image.disk_format in ("raw", "iso")
    return Path.COPY if raw else Path.CONVERT


def _features(gen: Generation) -> int | None:
    # None: as the cluster's own configuration says (rbd_default_features).
    return _SHAREABLE_FEATURES if gen.shareable else None


def _snapshot_name(snap_id: str) -> str:
    return f"{_SNAPSHOT}{snap_id}"


def _child_name(child: Mapping[str, Any]) -> str:
    return f"{child['pool']}/{child['image']}"
