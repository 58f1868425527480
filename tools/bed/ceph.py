# SPDX-License-Identifier: Apache-2.0
"""A Ceph cluster of one monitor, one manager and one OSD on a sparse file."""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path
from typing import Any

from bed.bed import LOOPBACK, BedError, Part

POOLS = ("vms", "vms2", "images", "volumes", "volumes2")
_SIZE = 40 << 30


def _rbd(*pools: str, read_only: tuple[str, ...] = ()) -> dict[str, str]:
    write = [f"profile rbd pool={pool}" for pool in pools]
    read = [f"profile rbd-read-only pool={pool}" for pool in read_only]
    return {
        "mon": "profile rbd",
        "mgr": ", ".join(write) or "profile rbd",
        "osd": ", ".join(write + read),
    }


#: Users and their caps, each as its service's documentation asks for.
USERS = {
    "admin": {key: "allow *" for key in ("mon", "mgr", "osd", "mds")},
    "glance": _rbd("images"),
    "cinder": _rbd("volumes", "volumes2", "images", "vms"),
    "imagebackend": {
        "mon": "profile rbd",
        "osd": "profile rbd pool=vms, profile rbd pool=vms2, "
        "profile rbd-read-only pool=images",
    },
    # Snapshots go straight into Glance's pool.
    "imagebackend-rw": _rbd("vms", "vms2", "images"),
    # Users that lack something, for the tests.
    "readonly": _rbd(read_only=("vms", "images")),
    "noblocklist": {
        "mon": "allow r",
        "osd": "allow class-read object_prefix rbd_children, allow rwx pool=vms",
    },
}

_CONF = """\
[global]
fsid = {fsid}
mon host = [v2:{ip}:{v2},v1:{ip}:{v1}]
public addr = {ip}
cluster addr = {ip}
public network = 127.0.0.0/8
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {folder}/$cluster.$name.keyring
run dir = {run}
log file = {log}/$name.log
admin socket = {run}/$name.$pid.$cctid.asok
crash dir = {log}
log to stderr = false
err to stderr = true
debug rocksdb = 1/5
debug bluestore = 0/5
debug bluefs = 0/5
debug bdev = 0/5
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000

[client]
log file =
admin socket =
rbd default features = 61
# With the OSD's watch timeout: a dead client's image is free after 2 s, not 30.
objecter tick interval = 0.5

[mon]
mon data = {folder}/mon
keyring = {folder}/mon.keyring
mon cluster log file = {log}/cluster.log
mon data avail warn = 5
mon data avail crit = 1
# One change of the maps a second is the default, and most of what a start costs.
paxos propose interval = 0.05
paxos min wait = 0.01

[mgr]
mgr data = {folder}/mgr
keyring = {folder}/mgr.keyring
mgr initial modules =

[osd]
osd data = {folder}/osd
keyring = {folder}/osd.keyring
osd objectstore = bluestore
osd journal =
osd class update on start = false
osd crush initial weight = 1
osd memory target = 1073741824
osd client watch timeout = 2
osd scrub begin hour = 0
osd deep scrub interval = 31536000
bluestore block size = {size}
bluestore block create = true
bluestore block db create = false
bluestore block wal create = false
bluestore fsck on mount = false
bluestore debug enforce settings = ssd
bdev aio poll ms = 50
osd op num shards = 2
osd op num threads per shard = 2
"""


class Ceph(Part):
    name = "ceph"
    programs = ("ceph-mon", "ceph-mgr", "ceph-osd", "ceph-authtool", "monmaptool")
    processes = ("ceph-mgr", "ceph-osd", "ceph-mon")

    @property
    def conf(self) -> Path:
        return self.folder / "ceph.conf"

    def missing(self) -> list[str]:
        lack = super().missing()
        try:
            import rados  # noqa: F401
            import rbd  # noqa: F401
        except ImportError as error:
            lack.append(f"the Python library {error.name}")
        return lack

    def up(self) -> None:
        made = self.folder / "made"
        new = not made.exists()
        if new:
            if self.folder.exists():
                raise BedError(
                    f"{self.folder} was left half made: tools/testbed down --wipe"
                )
            self._make()
        self._start_mon()
        if new:
            # The object store of the OSD needs no monitor: both at once.
            making = _Thread(self._make_osd)
            self._describe()
            making.result()
        self._start("osd", "0")
        self._start("mgr", "x")
        self._wait_osd()
        if new:
            self._init_pools()
            made.touch()
        else:
            self._wait_pools()

    def down(self) -> None:
        # The monitor last: it wants to hear that the others go.
        for each in self.processes:
            self.bed.stop(each)

    def where(self) -> str:
        return f"{self.conf} (users {', '.join(USERS)})"

    def env(self) -> dict[str, str]:
        return {"CEPH_CONF": str(self.conf)}

    # --- its pieces --------------------------------------------------------------

    def _make(self) -> None:
        for each in ("mgr", "osd"):
            (self.folder / each).mkdir(parents=True)
        fsid = str(uuid.uuid4())
        v1, v2 = self.bed.port("ceph-mon-v1"), self.bed.port("ceph-mon-v2")
        self.conf.write_text(
            _CONF.format(
                fsid=fsid,
                ip=LOOPBACK,
                v1=v1,
                v2=v2,
                folder=self.folder,
                run=self.bed.run,
                log=self.bed.log,
                size=_SIZE,
            )
        )
        seed = self.folder / "seed.keyring"
        text = self._key("mon.keyring", "mon.", {"mon": "allow *"})
        text += self._key(
            "mgr.keyring",
            "mgr.x",
            {"mon": "allow profile mgr", "osd": "allow *", "mds": "allow *"},
        )
        text += self._key(
            "osd.keyring",
            "osd.0",
            {"mon": "allow profile osd", "mgr": "allow profile osd", "osd": "allow *"},
        )
        for user, caps in USERS.items():
            name = f"client.{user}"
            text += self._key(f"ceph.{name}.keyring", name, caps)
        seed.write_text(text)
        seed.chmod(0o600)
        monmap = self.folder / "monmap"
        address = f"[v2:{LOOPBACK}:{v2},v1:{LOOPBACK}:{v1}]"
        self.bed.call(
            ["monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap]
        )
        self.bed.call(
            [
                *("ceph-mon", "-c", self.conf, "-i", "a", "--mkfs"),
                *("--monmap", monmap, "--keyring", seed),
            ]
        )
        seed.unlink()

    def _key(self, file: str, name: str, caps: dict[str, str]) -> str:
        path = self.folder / file
        words = [word for cap in caps.items() for word in ("--cap", *cap)]
        self.bed.call(["ceph-authtool", "-C", path, "--gen-key", "-n", name, *words])
        path.chmod(0o600)
        return path.read_text()

    def _make_osd(self) -> None:
        (self.folder / "osd" / "fsid").write_text(self._osd_uuid + "\n")
        self.bed.call(
            [
                *("ceph-osd", "-c", self.conf, "-i", "0", "--mkfs"),
                *("--osd-uuid", self._osd_uuid),
            ]
        )

    @property
    def _osd_uuid(self) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_URL, str(self.folder)))

    def _start_mon(self) -> None:
        for leftover in self.bed.run.glob("*.asok"):
            leftover.unlink()
        self._start("mon", "a")
        self.bed.wait("ceph-mon", self.bed.listens("ceph-mon-v2"))

    def _start(self, kind: str, which: str) -> None:
        ports = ("ceph-mon-v1", "ceph-mon-v2") if kind == "mon" else ()
        self.bed.start(
            f"ceph-{kind}",
            [f"ceph-{kind}", "-f", "-c", str(self.conf), "-i", which],
            ports=ports,
        )

    def _describe(self) -> None:
        """Tell the monitor of the OSD and the pools."""
        with _Client(self.conf) as client:
            client.mon("osd new", uuid=self._osd_uuid, id=0)
            # Clones of snapshots that are not protected.
            client.mon("osd set-require-min-compat-client", version="mimic")
            client.mon(
                "config set",
                who="mgr",
                name="mgr/devicehealth/enable_monitoring",
                value="false",
                force=True,
            )
            for pool in POOLS:
                client.mon(
                    *("osd pool create",),
                    pool=pool,
                    pg_num=8,
                    pgp_num=8,
                    pool_type="replicated",
                    size=1,
                )

    def _wait_osd(self) -> None:
        with _Client(self.conf) as client:
            self.bed.wait("ceph-osd", lambda: client.mon("osd stat")["num_up_osds"])

    def _init_pools(self) -> None:
        import rbd

        with _Client(self.conf) as client:

            def init(pool: str) -> None:
                with client.rados.open_ioctx(pool) as ioctx:
                    rbd.RBD().pool_init(ioctx, True)

            for thread in [_Thread(init, pool) for pool in POOLS]:
                thread.result()

    def _wait_pools(self) -> None:
        """The old map says "up" until the new OSD is known: only a read tells."""
        with _Client(self.conf) as client:
            client.rados.conf_set("rados_osd_op_timeout", "30")
            for pool in POOLS:
                with client.rados.open_ioctx(pool) as ioctx:
                    ioctx.read("rbd_info", 1)


class _Client:
    """The cluster's administrator."""

    def __init__(self, conf: Path) -> None:
        import rados

        self.rados = rados.Rados(conffile=str(conf), rados_id="admin")

    def __enter__(self) -> _Client:
        self.rados.connect(timeout=30)
        return self

    def __exit__(self, *_: object) -> None:
        self.rados.shutdown()

    def mon(self, prefix: str, **arguments: Any) -> Any:
        command = json.dumps({"prefix": prefix, "format": "json", **arguments})
        code, out, reason = self.rados.mon_command(command, b"", timeout=60)
        if code:
            raise BedError(f"ceph {prefix}: {reason} ({code})")
        return json.loads(out) if out.strip() else None


class _Thread:
    def __init__(self, function: Any, *args: Any) -> None:
        self._error: BaseException | None = None

        def work() -> None:
            try:
                function(*args)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def result(self) -> None:
        self._thread.join(120)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise BedError("Ceph does not answer")
