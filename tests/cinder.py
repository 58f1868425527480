# SPDX-License-Identifier: Apache-2.0
"""The cloud's Cinder, as its administrator sees it, and a service user of a project of
its own, so that nothing else is in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cloud import Cloud, User, user_of, wait


@dataclass(frozen=True)
class CinderUnderTest:
    """:ivar service: who owns the volumes. :ivar conf: of the cluster that some of
    them are in."""

    cloud: Cloud
    service: User
    conf: str

    @property
    def api(self) -> Any:
        return self.service.connection.block_storage

    @property
    def options(self) -> dict[str, Any]:
        """Options of a backend, as the service user."""
        return {
            "auth_type": "password",
            **self.service.options,
            "ceph_conf": self.conf,
            "lock_path": "/var/tmp/imagebackend-locks",
        }

    @property
    def section(self) -> str:
        """The same as a file has them."""
        lines = [f"{key} = {value}" for key, value in self.options.items()]
        return "\n".join(["[cinder]", *lines, ""])

    # --- what there is -------------------------------------------------------------

    def get(self, path: str) -> Any:
        answer = self.api.get(path, microversion="3.71")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def volumes(self) -> list[dict[str, Any]]:
        """Of the service user's project."""
        found: list[dict[str, Any]] = self.get("/volumes/detail")["volumes"]
        return found

    def snapshots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/snapshots/detail")["snapshots"]
        return found

    def attachments(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/attachments/detail")["attachments"]
        return found

    # --- what is done to it --------------------------------------------------------

    def foreign(self, **body: Any) -> str:
        """A volume of the service's project that is not ours."""
        body = {"size": 1, "name": "somebody's", **body}
        answer = self.api.post("/volumes", json={"volume": body})
        assert answer.status_code == 202, answer.text
        volume_id: str = answer.json()["volume"]["id"]
        wait(lambda: self._status(volume_id) == "available", f"volume {volume_id}")
        return volume_id

    def _status(self, volume_id: str) -> str:
        return str(self.get(f"/volumes/{volume_id}")["volume"]["status"])

    def clean(self) -> None:
        """Remove everything in the project, whatever its state."""
        for each in self.attachments():
            self.api.delete(f"/attachments/{each['id']}", microversion="3.71")
        for each in self.snapshots():
            self._force(f"/snapshots/{each['id']}")
        wait(lambda: not self.snapshots(), "snapshots are left")
        for each in self.volumes():
            self._force(f"/volumes/{each['id']}")
        wait(lambda: not self.volumes(), "volumes are left")

    def _force(self, path: str) -> None:
        for body in ({"os-reset_status": {"status": "error"}}, {"os-force_delete": {}}):
            self.api.post(f"{path}/action", json=body)


def cinder_of_the_bed(cloud: Cloud) -> Iterator[CinderUnderTest]:
    folder = os.environ.get("IMAGEBACKEND_TESTBED")
    conf = os.environ.get("CEPH_CONF") or f"{folder}/ceph/ceph.conf"
    if folder:
        # Shares are mounted as the bed's own volume service mounts them.
        os.environ["PATH"] = f"{folder}/cinder/bin:{os.environ['PATH']}"
    roles = ("admin", "service")
    with user_of(cloud.admin, "cinder", roles) as service:
        found = CinderUnderTest(cloud, service, conf)
        yield found
        found.clean()


def unmount(folder: Path) -> None:
    """What was mounted below a folder."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        points = [line.split()[4] for line in file]
    for point in points:
        if point.startswith(f"{folder}/"):
            subprocess.run(["umount", point], check=True)


__all__ = ["CinderUnderTest", "cinder_of_the_bed", "unmount"]
