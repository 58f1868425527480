# SPDX-License-Identifier: Apache-2.0
"""The cloud's Cinder, as its administrator sees it, and a service user of a project of
its own, so that nothing else is in it."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cloud import Cloud, User, user_of, wait

#: Shares are mounted on this host: os-brick has to be root for that.
MOUNTS = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
#: A volume type of each kind: in Ceph, and in files.
TYPES = pytest.mark.parametrize(
    "volume_type", ["rbd1", pytest.param("nfs1", marks=MOUNTS)]
)


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

    def names(self) -> list[str]:
        return sorted(each["name"] for each in self.volumes())

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

    def action(self, volume_id: str, name: str, **body: Any) -> None:
        """As an administrator does it."""
        path = f"/volumes/{volume_id}/action"
        answer = self.api.post(path, json={name: body}, microversion="3.71")
        assert answer.status_code in (200, 202), answer.text

    def set_metadata(self, volume_id: str, metadata: dict[str, str]) -> None:
        path = f"/volumes/{volume_id}/metadata"
        answer = self.api.post(path, json={"metadata": metadata})
        assert answer.status_code == 200, answer.text

    def snapshot(self, volume_id: str, name: str) -> None:
        body = {"volume_id": volume_id, "name": name, "force": True}
        answer = self.api.post("/snapshots", json={"snapshot": body})
        assert answer.status_code == 202, answer.text
        wait(lambda: self.snapshots()[0]["status"] == "available", name)

    @contextmanager
    def type_of(
        self,
        backend: str,
        *,
        private: bool = False,
        projects: tuple[str, ...] = (),
        **extra_specs: str,
    ) -> Iterator[str]:
        """A volume type of its own, that leads to a back end; removed after it."""
        api = self.cloud.admin.block_storage
        name = f"test-{uuid.uuid4().hex[:8]}"
        body = {
            "name": name,
            "extra_specs": {"volume_backend_name": backend, **extra_specs},
            "os-volume-type-access:is_public": not private,
        }
        answer = api.post("/types", json={"volume_type": body})
        assert answer.status_code == 200, answer.text
        type_id = answer.json()["volume_type"]["id"]
        for project in projects:
            self._access(type_id, "addProjectAccess", project)
        try:
            yield name
        finally:
            self.clean()
            answer = api.delete(f"/types/{type_id}")
            assert answer.status_code == 202, answer.text

    def withdraw(self, volume_type: str, project: str) -> None:
        listed = self.get("/types?is_public=None")["volume_types"]
        (found,) = [each for each in listed if each["name"] == volume_type]
        self._access(found["id"], "removeProjectAccess", project)

    def _access(self, type_id: str, verb: str, project: str) -> None:
        answer = self.cloud.admin.block_storage.post(
            f"/types/{type_id}/action", json={verb: {"project": project}}
        )
        assert answer.status_code == 202, answer.text

    def clean(self) -> None:
        """Remove everything in the project, whatever its state."""
        token = {"X-Service-Token": self.service.connection.auth_token}
        for each in self.attachments():
            path = f"/attachments/{each['id']}"
            self.api.delete(path, headers=token, microversion="3.71")
        for each in self.snapshots():
            self.force(f"/snapshots/{each['id']}")
        wait(lambda: not self.snapshots(), "snapshots are left")
        for each in self.volumes():
            self.force(f"/volumes/{each['id']}")
        wait(lambda: not self.volumes(), "volumes are left")

    def force(self, path: str) -> None:
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
