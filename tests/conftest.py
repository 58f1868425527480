# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: a host of its own for each test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from oslo_config import cfg

import imagebackend.conf
from imagebackend import DiskManager, Flavor, Instance
from imagebackend.model import GiB, MiB
from tests.ceph import Ceph, ceph_of_the_bed
from tests.cinder import CinderUnderTest, cinder_of_the_bed
from tests.cloud import Cloud, cloud_of_the_bed

#: Lines that tests want to be read, also when all is well.
SUMMARY: list[str] = []

#: All that may be skipped where the test bed runs, and why.
SKIPS = {
    "needs root": "mounts, other users and limits are root's to make",
    "needs the bed": "a cloud or Ceph that is not ours is not stopped nor filled",
}
BACKENDS = ("qcow2", "raw", "rbd", "cinder", "remote")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SUMMARY:
        terminalreporter.section("what was measured")
    for line in SUMMARY:
        terminalreporter.write_line(line)
    passed = [report.nodeid.lower() for report in terminalreporter.getreports("passed")]
    counts = {
        name: sum(
            bool(re.search(rf"(test_?|\[|-|slow){name}", each)) for each in passed
        )
        for name in BACKENDS
    }
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    terminalreporter.write_line(f"tests passed by backend: {told}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under ``make test`` nothing steps aside but for a reason of the list."""
    report = yield
    if report.skipped and "IMAGEBACKEND_TESTBED" in os.environ:
        reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else "")
        if not any(each in reason for each in SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped: {reason}"
    return report


@dataclass
class HostUnderTest:
    """A host: its folder, its configuration, and what fills its image folder."""

    path: Path
    conf: cfg.ConfigOpts
    managers: list[DiskManager] = field(default_factory=list)
    ceph: Ceph | None = None
    cinder: CinderUnderTest | None = None

    @property
    def images(self) -> Path:
        return self.path / "images"

    @property
    def config_file(self) -> Path:
        return self.path / "imagebackend.conf"

    def manager(self) -> DiskManager:
        """A new manager on the same host, as after a restart."""
        manager = DiskManager(self.conf)
        self.managers.append(manager)
        return manager

    def set(self, option: str, value: object, group: str = "imagebackend") -> None:
        self.conf.set_override(option, value, group)

    def enable_rbd(self, ceph: Ceph) -> None:
        """The backend ``rbd``, beside the others."""
        self.ceph = ceph
        with open(self.conf.config_file[0], "a") as file:
            file.write(ceph.section)
        self.conf.reload_config_files()
        enabled = self.conf.imagebackend.enabled_backends
        self.set("enabled_backends", [*enabled, "rbd"])

    def enable_cinder(self, cinder: CinderUnderTest, **options: object) -> None:
        """The backend ``cinder``, beside the others."""
        self.cinder = cinder
        lines = [f"{key} = {value}\n" for key, value in options.items()]
        with open(self.conf.config_file[0], "a") as file:
            file.write(cinder.section + "".join(lines))
        self.conf.reload_config_files()
        enabled = self.conf.imagebackend.enabled_backends
        self.set("enabled_backends", [*enabled, "cinder"])

    def raw_image(self, name: str = "raw-image", size: int = MiB) -> bytes:
        """An image in the folder; returns its bytes, which are all different."""
        data = os.urandom(size)
        (self.images / f"{name}.raw").write_bytes(data)
        return data

    def qcow2_image(self, name: str = "qcow2-image", size: int = 8 * MiB) -> bytes:
        """A qcow2 image in the folder; returns what a guest would read from it."""
        data = os.urandom(MiB) + bytes(size - MiB)
        raw = self.path / f"{name}.tmp"
        raw.write_bytes(data)
        subprocess.run(
            [
                *("qemu-img", "convert", "-f", "raw", "-O", "qcow2"),
                *(raw, self.images / f"{name}.qcow2"),
            ],
            check=True,
        )
        raw.unlink()
        return data

    def describe(self, name: str, **says: object) -> None:
        """Metadata beside an image."""
        (self.images / f"{name}.json").write_text(json.dumps(says))

    def instance(
        self,
        image: str | None = "raw-image",
        *,
        root_gb: int = 1,
        id: str | None = None,
        project_id: str = "project",
        ephemeral_gb: int = 0,
        swap_mb: int = 0,
        **extra_specs: str,
    ) -> Instance:
        specs = {key.replace("__", ":"): value for key, value in extra_specs.items()}
        flavor = Flavor("small", root_gb, ephemeral_gb, swap_mb, specs)
        return Instance(id or str(uuid.uuid4()), project_id, image, flavor)

    def objects(self) -> list[str]:
        """All that disks are kept in, told by the storages' own tools."""
        images = [] if self.ceph is None else self.ceph.images() + self.ceph.trash()
        volumes = [] if self.cinder is None else self.cinder.names()
        return self.files() + images + volumes

    def files(self, folder: str = "instances") -> list[str]:
        """What there is, told by the file system alone."""
        root = self.path / folder
        return sorted(
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file() and not path.name.startswith(".folder-id")
        )


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Callable[[str], HostUnderTest]]:
    """Hosts by name, each with a folder and a configuration of its own."""
    made: list[HostUnderTest] = []

    def make(name: str) -> HostUnderTest:
        path = tmp_path / name
        (path / "images").mkdir(parents=True)
        file = path / "imagebackend.conf"
        file.write_text(
            f"[imagebackend]\nstate_path = {path}\nenabled_backends = qcow2, raw\n"
        )
        conf = cfg.ConfigOpts()
        imagebackend.conf.register(conf)
        conf(["--config-file", str(file)], project="imagebackend")
        made.append(HostUnderTest(path, conf))
        return made[-1]

    yield make
    for host in made:
        for manager in host.managers:
            manager.close()


@pytest.fixture
def host(make_host: Callable[[str], HostUnderTest]) -> HostUnderTest:
    return make_host("host")


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    yield from cloud_of_the_bed()


@pytest.fixture(scope="session")
def bed_ceph() -> Ceph:
    return ceph_of_the_bed()


@pytest.fixture
def ceph(bed_ceph: Ceph) -> Iterator[Ceph]:
    """The bed's Ceph, its pools empty before and after."""
    bed_ceph.clean()
    yield bed_ceph
    bed_ceph.clean()


@pytest.fixture(scope="session")
def bed_cinder(cloud: Cloud) -> Iterator[CinderUnderTest]:
    yield from cinder_of_the_bed(cloud)


@pytest.fixture
def cinder(bed_cinder: CinderUnderTest) -> Iterator[CinderUnderTest]:
    """A real Cinder, with an empty project."""
    yield bed_cinder
    bed_cinder.clean()


@pytest.fixture
def manager(host: HostUnderTest) -> DiskManager:
    return host.manager()


def read_disk(xml_source: object, offset: int = 0, length: int = MiB) -> bytes:
    """What a guest would read, told by qemu-img from a copy."""
    from imagebackend.qemu_img import image_opts

    target = Path(os.environ.get("TMPDIR", "/tmp")) / f"read-{uuid.uuid4()}"
    try:
        subprocess.run(
            [
                *("qemu-img", "dd", "-U", "--image-opts"),
                f"bs={MiB}",
                f"skip={offset // MiB}",
                # It counts what it skips as well.
                f"count={offset // MiB - (-length // MiB)}",
                f"if={image_opts(xml_source)}",  # type: ignore[arg-type]
                f"of={target}",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return target.read_bytes()[:length]
    finally:
        target.unlink(missing_ok=True)


__all__ = ["SUMMARY", "GiB", "HostUnderTest", "MiB", "read_disk"]
