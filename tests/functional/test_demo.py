# SPDX-License-Identifier: Apache-2.0
"""The demo tells its whole story on each storage, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.cinder import MOUNTS, unmount
from tests.conftest import HostUnderTest

STEPS = [
    *("create", "boot", "boot again", "grow, running", "snapshot, running"),
    *("rebuild", "boot", "destroy"),
]


def secrets() -> str:
    """Told by virsh."""
    return subprocess.run(
        ["virsh", "-q", "-c", "qemu:///system", "secret-list"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def _remove(mounts: Path) -> None:
    unmount(mounts)
    # Folders alone: what is still mounted is not emptied.
    for each in mounts.iterdir():
        each.rmdir()
    mounts.rmdir()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "where",
    [
        *("qcow2", "raw", "rbd", "cinder rbd2"),
        pytest.param("cinder nfs2", marks=MOUNTS),
    ],
)
def test_the_demo_tells_its_story_and_leaves_nothing(
    request: pytest.FixtureRequest, host: HostUnderTest, where: str
) -> None:
    backend, _, volume_type = where.partition(" ")
    if backend == "rbd":
        host.enable_rbd(request.getfixturevalue("ceph"))
    mounts = Path("/var/tmp") / f"imagebackend-test-{uuid.uuid4()}"
    if backend == "cinder":
        cinder = request.getfixturevalue("cinder")
        host.enable_cinder(cinder, mount_path=mounts)
        mounts.mkdir()
        request.addfinalizer(lambda: _remove(mounts))
    image = os.environ.get("IMAGEBACKEND_GUEST_IMAGE")
    assert image, "make test sets IMAGEBACKEND_GUEST_IMAGE"
    before = secrets()
    command = Path(sys.executable).with_name("imagebackend")
    done = subprocess.run(
        [
            *(command, "--config-file", host.config_file, "demo"),
            *("--backend", backend, "--guest-image", image),
            *(["--volume-type", volume_type] if volume_type else []),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^\d+\. (.{20})", done.stdout, re.MULTILINE)
    assert [each.strip() for each in told] == STEPS
    boots = ["1", "2", "2", "1"]
    if volume_type == "nfs2":  # it grows only while it is off
        boots.remove("2")
    assert re.findall(r"guest: boot +(\d)", done.stdout) == boots
    if backend in ("rbd", "cinder"):
        assert re.search(r"this host's disk +0 B ", done.stdout), done.stdout
    for what in ("disks left", "files left", "audit"):
        assert re.search(rf"{what} +0", done.stdout), done.stdout
    assert host.objects() == []
    assert secrets() == before
