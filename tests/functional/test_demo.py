# SPDX-License-Identifier: Apache-2.0
"""The demo tells its whole story on each storage, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["qcow2", "raw", "rbd"])
def test_the_demo_tells_its_story_and_leaves_nothing(
    request: pytest.FixtureRequest, host: HostUnderTest, backend: str
) -> None:
    if backend == "rbd":
        host.enable_rbd(request.getfixturevalue("ceph"))
    image = os.environ.get("IMAGEBACKEND_GUEST_IMAGE")
    assert image, "make test sets IMAGEBACKEND_GUEST_IMAGE"
    before = secrets()
    command = Path(sys.executable).with_name("imagebackend")
    done = subprocess.run(
        [
            *(command, "--config-file", host.config_file, "demo"),
            *("--backend", backend, "--guest-image", image),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^\d+\. (.{20})", done.stdout, re.MULTILINE)
    assert [each.strip() for each in told] == STEPS
    assert re.findall(r"guest: boot +(\d)", done.stdout) == ["1", "2", "2", "1"]
    for what in ("disks left", "files left", "audit"):
        assert re.search(rf"{what} +0", done.stdout), done.stdout
    assert host.objects() == []
    assert secrets() == before
