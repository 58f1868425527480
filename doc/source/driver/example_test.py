# SPDX-License-Identifier: Apache-2.0
"""The conformance kit over the example."""

import os
from pathlib import Path

import pytest
from example import FlatBackend
from oslo_config import cfg

from imagebackend import conf as options
from imagebackend.backends.base import Backend
from imagebackend.model import Generation
from imagebackend.testing.harness import Harness
from imagebackend.testing.suite import BackendSuite


class FlatHarness(Harness):
    """What the suite has to know of the storage."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.disks = os.path.join(folder, "disks")
        os.mkdir(self.disks)
        self.conf = cfg.ConfigOpts()
        options.register(self.conf)
        self.conf([], default_config_files=[])
        self.conf.register_opts(FlatBackend.OPTIONS, group="flat")
        self.conf.set_override("path", self.disks, "flat")

    def backend(self, deployment_id: str = "0123456789ab") -> Backend:
        return FlatBackend("flat", self.conf, deployment_id)

    def plant(self, gen: Generation) -> bool:
        name = f"{gen.disk_name}.{gen.id}.{gen.deployment_id}"
        Path(self.disks, name).write_text("somebody else's")
        return True

    def foreign(self) -> bool:
        Path(self.disks, "somebody.txt").write_text("somebody else's")
        return True


class TestFlat(BackendSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FlatHarness(str(tmp_path))
