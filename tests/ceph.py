# SPDX-License-Identifier: Apache-2.0
"""The test bed's Ceph, through Ceph's own tools and as its administrator."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

USER = "imagebackend"
#: Of the user's: the tests empty them. Glance's images lie in ``images``.
POOLS = ("vms", "vms2")


@dataclass(frozen=True)
class Ceph:
    """:ivar uploaded: images that a test put into Glance's pool."""

    conf: str
    uploaded: list[str] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        """Options of a backend in this cluster."""
        return {"ceph_conf": self.conf, "user": USER, "pools": list(POOLS)}

    @property
    def section(self) -> str:
        """The same as a file has them."""
        return (
            f"[rbd]\nceph_conf = {self.conf}\nuser = {USER}\n"
            f"pools = {', '.join(POOLS)}\n"
        )

    def rbd(self, *words: str, user: str = "admin") -> str:
        return self._run("rbd", *words, user=user)

    def ceph(self, *words: str, user: str = "admin") -> str:
        return self._run("ceph", *words, user=user)

    def _run(self, *words: str, user: str) -> str:
        done = subprocess.run(
            [words[0], "-c", self.conf, "--id", user, *words[1:]],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(words)}: {done.stderr}{done.stdout}")
        return done.stdout

    @property
    def fsid(self) -> str:
        return self.ceph("fsid").strip()

    def images(self, *pools: str) -> list[str]:
        """``pool/name`` of all images."""
        return sorted(
            f"{pool}/{name}"
            for pool in pools or POOLS
            for name in self.rbd("ls", pool).split()
        )

    def trash(self, *pools: str) -> list[str]:
        """``pool/name`` of what the trash holds."""
        return sorted(
            f"{pool}/{each['name']}"
            for pool in pools or POOLS
            for each in json.loads(self.rbd("trash", "ls", pool, "--format", "json"))
        )

    def info(self, image: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.rbd("info", image, "--format", "json"))
        return facts

    def content(self, image: str, length: int, offset: int = 0) -> bytes:
        """Bytes of an image, by librbd."""
        import rbd

        pool, name = image.split("/")
        with (
            self.admin() as rados,
            rados.open_ioctx(pool) as ioctx,
            rbd.Image(ioctx, name, read_only=True) as opened,
        ):
            data: bytes = opened.read(offset, length)
            return data

    def upload(self, path: Path | str, image: str, snapshot: str = "snap") -> str:
        """An image as Glance keeps it; its location."""
        self.uploaded.append(image)
        self.rbd("import", str(path), image)
        self.rbd("snap", "create", f"{image}@{snapshot}")
        return f"rbd://{self.fsid}/{image}/{snapshot}"

    @contextmanager
    def admin(self) -> Iterator[Any]:
        import rados

        cluster = rados.Rados(conffile=self.conf, rados_id="admin")
        cluster.connect(timeout=10)
        try:
            yield cluster
        finally:
            cluster.shutdown()

    def clean(self) -> None:
        """Both pools are empty afterwards, whatever hung on what, and what a test put
        into Glance's is gone."""
        import rbd

        with self.admin() as cluster:
            ioctxs = [cluster.open_ioctx(pool) for pool in POOLS]
            for _ in range(20):
                if not sum(_clean(rbd, ioctx) for ioctx in ioctxs):
                    break
            else:
                raise AssertionError(f"not removed: {self.images()}, {self.trash()}")
            for image in self.uploaded:
                pool, name = image.split("/")
                with cluster.open_ioctx(pool) as ioctx:
                    _drop(rbd, ioctx, {"name": name})
        self.uploaded.clear()


def _clean(rbd: Any, ioctx: Any) -> int:
    """One pass; how much is left. Clones go before what they were made from."""
    trash = list(rbd.RBD().trash_list(ioctx))
    names = rbd.RBD().list(ioctx)
    for where in [{"name": name} for name in names] + [
        {"image_id": each["id"]} for each in trash
    ]:
        _drop(rbd, ioctx, where)
    return len(rbd.RBD().list(ioctx)) + len(list(rbd.RBD().trash_list(ioctx)))


def _drop(rbd: Any, ioctx: Any, where: dict[str, str]) -> None:
    """An image with its snapshots, if nothing hangs on it."""
    try:
        with rbd.Image(ioctx, **where) as image:
            for snap in list(image.list_snaps()):
                if snap["namespace"] == rbd.RBD_SNAP_NAMESPACE_TYPE_USER:
                    if image.is_protected_snap(snap["name"]):
                        image.unprotect_snap(snap["name"])
                    image.remove_snap(snap["name"])
        if "name" in where:
            rbd.RBD().remove(ioctx, where["name"])
        else:
            rbd.RBD().trash_remove(ioctx, where["image_id"], force=True)
    except (rbd.ImageNotFound, rbd.ImageBusy, rbd.ImageHasSnapshots):
        pass


def ceph_of_the_bed() -> Ceph:
    """The bed's cluster. Under ``make test`` it is there, or the tests fail."""
    conf = os.environ.get("CEPH_CONF")
    if not conf:
        if "IMAGEBACKEND_TESTBED" in os.environ:
            pytest.fail("the test bed runs without Ceph")
        pytest.skip("no Ceph: tools/testbed run COMMAND brings one up")
    if not {"IMAGEBACKEND_TESTBED", "IMAGEBACKEND_EMPTY_POOLS"} & set(os.environ):
        pytest.skip(
            f"IMAGEBACKEND_EMPTY_POOLS=yes lets the tests empty the pools "
            f"{', '.join(POOLS)} of {conf}"
        )
    return Ceph(conf)
