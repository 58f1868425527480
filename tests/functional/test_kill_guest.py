# SPDX-License-Identifier: Apache-2.0
"""Killed while it works on a running guest: the guest goes on, and no job is left."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from imagebackend import DiskManager, UploadTarget
from imagebackend.libvirt.guest import Guest
from tests.conftest import GiB, HostUnderTest
from tests.functional.killing import Scene, every_kill
from tests.functional.test_guest import guest_host, image, larger, running

__all__ = ["guest_host", "image"]  # fixtures

pytestmark = pytest.mark.timeout(900)

#: libvirt's client talks by write; the rest is ours.
CALLS = ("write", "fsync,fdatasync", "link,linkat", "unlink,unlinkat", "rmdir")


@pytest.fixture
def scene(guest_host: HostUnderTest) -> Iterator[Scene]:
    manager = guest_host.manager()
    instance = guest_host.instance("guest")
    manager.create(instance)
    scene = Scene(guest_host, manager, instance, b"")
    with running(manager, instance) as guest:
        # What a child would import is imported here: it is forked off.
        manager.snapshot(instance.id, UploadTarget("warm"), lookup(scene))
        yield scene
        assert guest.command("sum vda 0 1").startswith("sum ")
        guest.poweroff()


def lookup(scene: Scene) -> Guest:
    return Guest.lookup(scene.host.conf, scene.instance.id)


def no_job(scene: Scene) -> None:
    """Told by virsh."""
    for verb in ("domjobinfo", "domblklist"):
        told = subprocess.run(
            ["virsh", "-q", verb, scene.instance.id],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert "Backup" not in told and "Unbounded" not in told


def test_a_snapshot_of_a_running_guest_is_whole_or_not_there(scene: Scene) -> None:
    target = scene.host.images / "snap.qcow2"

    def prepare() -> None:
        target.unlink(missing_ok=True)
        target.with_suffix(".json").unlink(missing_ok=True)

    def verify(outcome: str) -> None:
        no_job(scene)
        assert target.exists() == target.with_suffix(".json").exists()
        if outcome == "done":
            assert target.exists()
        if target.exists():
            subprocess.run(
                ["qemu-img", "check", "-q", "-f", "qcow2", target], check=True
            )

    def work(manager: DiskManager) -> None:
        manager.snapshot(scene.instance.id, UploadTarget("snap"), lookup(scene))

    every_kill(scene, "snapshot, running", prepare, work, verify, CALLS)


def test_growth_of_a_running_guest_is_what_the_rows_say(scene: Scene) -> None:
    size = [1]

    def prepare() -> None:
        size[0] += 1

    def verify(outcome: str) -> None:
        no_job(scene)
        ((recorded,),) = scene.rows("SELECT size FROM disks")
        told = subprocess.run(
            ["virsh", "-q", "domblkinfo", scene.instance.id, "vda"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert str(recorded) in told.split("\n")[0]
        if outcome == "done":
            assert recorded == size[0] * GiB

    def work(manager: DiskManager) -> None:
        manager.resize(larger(scene.instance, size[0]), lookup(scene))

    every_kill(scene, "resize, running", prepare, work, verify, CALLS)
