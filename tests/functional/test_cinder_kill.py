# SPDX-License-Identifier: Apache-2.0
"""Killed from outside at its requests to Cinder and between them, then recovered:
Cinder holds what the rows say, and nothing else."""

from __future__ import annotations

import pytest

from imagebackend import DiskManager
from tests.cinder import CinderUnderTest
from tests.conftest import HostUnderTest
from tests.functional.killing import CINDER_CALLS, Scene, every_kill
from tests.functional.test_cinder import agree

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def scene(host: HostUnderTest, cinder: CinderUnderTest) -> Scene:
    """Images are in a folder, so that a root disk's bytes come through this host."""
    host.enable_cinder(cinder, default_type="rbd1")
    host.set("default_backend", "cinder")
    image = host.raw_image()
    manager = host.manager()
    # What a child would import is imported here: it is forked off.
    warm = host.instance()
    manager.create(warm)
    manager.connect(warm.id)
    manager.disconnect(warm.id)
    manager.destroy(warm.id)
    return Scene(host, manager, host.instance(), image)


def compare(scene: Scene) -> None:
    manager = scene.host.manager()
    agree(scene.host, manager)
    states = {str(disk.state) for disk in manager.list()}
    manager.close()
    assert states <= {"ready"}
    for folder in ("locks", "tmp", "cache/tmp"):
        assert scene.host.files(folder) == [], folder


def born(manager: DiskManager, scene: Scene) -> None:
    manager.create(scene.instance)
    manager.connect(scene.instance.id)


def gone(scene: Scene) -> None:
    manager = scene.host.manager()
    manager.destroy(scene.instance.id)
    manager.close()
    assert scene.host.objects() == []


def test_birth_and_connection_are_whole_or_undone(scene: Scene) -> None:
    def verify(outcome: str) -> None:
        disks = scene.rows("SELECT id FROM disks")
        if outcome == "done":
            assert len(disks) == 1
        gone(scene)

    every_kill(
        scene,
        "create, connect",
        lambda: None,
        lambda manager: born(manager, scene),
        verify,
        CINDER_CALLS,
        compare,
    )


def test_destroy_ends_once_begun(scene: Scene) -> None:
    def prepare() -> None:
        scene.manager.create(scene.instance)
        scene.manager.connect(scene.instance.id)

    def verify(outcome: str) -> None:
        if outcome == "done":
            assert scene.rows("SELECT id FROM disks") == []
        gone(scene)

    every_kill(
        scene,
        "destroy",
        prepare,
        lambda manager: manager.destroy(scene.instance.id),
        verify,
        CINDER_CALLS,
        compare,
    )
