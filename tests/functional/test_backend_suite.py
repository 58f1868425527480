# SPDX-License-Identifier: Apache-2.0
"""The behaviour suite over every backend, unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from oslo_config import cfg

import imagebackend.conf
from imagebackend.backends.base import Backend
from imagebackend.backends.qcow2 import Qcow2Backend
from imagebackend.backends.raw import RawBackend
from imagebackend.conf.keystone import register_keystone
from imagebackend.model import Generation, MiB
from imagebackend.testing.harness import Harness
from imagebackend.testing.remote import Faults, SlowRemoteBackend
from imagebackend.testing.suite import BackendSuite
from tests.ceph import Ceph
from tests.cinder import MOUNTS, CinderUnderTest, unmount


class LocalHarness(Harness):
    """Backends that need no more than a folder."""

    driver: ClassVar[type[Backend]]

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.conf = cfg.ConfigOpts()
        imagebackend.conf.register(self.conf)
        self.conf([], default_config_files=[])
        self.conf.set_override("state_path", folder, "imagebackend")
        self.conf.register_opts(self.driver.OPTIONS, group="mine")

    def backend(self, deployment_id: str = "0123456789ab") -> Backend:
        return self.driver("mine", self.conf, deployment_id)


class FileHarness(LocalHarness):
    @property
    def _root(self) -> Path:
        return Path(self.folder) / "instances"

    def plant(self, gen: Generation) -> bool:
        folder = self._root / str(gen.instance_id)
        folder.mkdir(exist_ok=True)
        name = f"{gen.disk_name}.{gen.id}.{gen.deployment_id}"
        (folder / name).write_text("somebody else's")
        return True

    def foreign(self) -> bool:
        (self._root / "somebody.txt").write_text("somebody else's")
        return True


class RawHarness(FileHarness):
    driver = RawBackend


class Qcow2Harness(FileHarness):
    driver = Qcow2Backend


class RemoteHarness(LocalHarness):
    driver = SlowRemoteBackend

    def __init__(self, folder: str, volume_type: str) -> None:
        super().__init__(folder)
        self.volume_type = volume_type
        self.server = Path(folder) / "server"
        self.server.mkdir()
        self.conf.set_override("folder", str(self.server), "mine")

    def lose_answer(self, request: str) -> bool:
        Faults(str(self.server)).set(request, "lost")
        return True

    def foreign(self) -> bool:
        state = json.loads((self.server / "state.json").read_text())
        state["volumes"]["theirs"] = {
            "id": "theirs",
            "type": "fast",
            "size": 0,
            "marker": None,
            "created": 0.0,
        }
        (self.server / "state.json").write_text(json.dumps(state))
        return True


class RbdHarness(LocalHarness):
    size = 64 * MiB

    def __init__(self, folder: str, ceph: Ceph) -> None:
        from imagebackend.backends.ceph_rbd import RbdBackend

        self.driver = RbdBackend  # type: ignore[misc]
        super().__init__(folder)
        self.ceph = ceph
        options = {**ceph.options, "delete_timeout": 2}
        for option, value in options.items():
            self.conf.set_override(option, value, "mine")

    def plant(self, gen: Generation) -> bool:
        name = f"{gen.disk_name}.{gen.id}.{gen.deployment_id}"
        self.ceph.rbd("create", f"{gen.handle['pool']}/{name}", "--size", "1")
        return True

    def foreign(self) -> bool:
        self.ceph.rbd("create", "vms/somebody's", "--size", "1")
        return True


class TestRaw(BackendSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return RawHarness(str(tmp_path))


class TestQcow2(BackendSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return Qcow2Harness(str(tmp_path))


class TestSlowRemote(BackendSuite):
    @pytest.fixture(params=["fast", "file", "plain"])
    def harness(self, tmp_path: Path, request: pytest.FixtureRequest) -> Harness:
        return RemoteHarness(str(tmp_path), request.param)


class TestRbd(BackendSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path, ceph: Ceph) -> Iterator[Harness]:
        yield RbdHarness(str(tmp_path), ceph)


class CinderHarness(LocalHarness):
    def __init__(self, folder: str, cinder: CinderUnderTest, volume_type: str) -> None:
        from imagebackend.backends.cinder_volume import CinderBackend

        self.driver = CinderBackend  # type: ignore[misc]
        super().__init__(folder)
        self.volume_type = volume_type
        self.cinder = cinder
        register_keystone(self.conf, "mine")
        options = {**cinder.options, "mount_path": f"{folder}/mnt"}
        self.conf.set_override("auth_type", "password", "mine")
        register_keystone(self.conf, "mine")
        for option, value in options.items():
            self.conf.set_override(option, value, "mine")

    def foreign(self) -> bool:
        self.cinder.foreign()
        return True


class TestCinder(BackendSuite):
    @pytest.fixture(params=["rbd1", pytest.param("nfs1", marks=MOUNTS)])
    def harness(
        self,
        tmp_path: Path,
        cinder: CinderUnderTest,
        request: pytest.FixtureRequest,
    ) -> Iterator[Harness]:
        os.chmod(tmp_path, 0o755)
        yield CinderHarness(str(tmp_path), cinder, request.param)
        unmount(tmp_path)
