# SPDX-License-Identifier: Apache-2.0
"""Killed from outside at every system call that matters, then recovered: no leak,
nothing lost, every disk that was promised is whole."""

from __future__ import annotations

import dataclasses
import time

import pytest

from imagebackend import DiskSpec, Lifecycle, UploadTarget
from tests.conftest import HostUnderTest, MiB
from tests.functional.killing import (
    PATTERN,
    Scene,
    content,
    every_kill,
    whole,
    write_root,
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(params=["qcow2", "raw", "rbd"])
def scene(request: pytest.FixtureRequest, host: HostUnderTest) -> Scene:
    if request.param == "rbd":
        host.enable_rbd(request.getfixturevalue("ceph"))
    return a_scene(host, request.param)


@pytest.fixture(params=["qcow2", "raw"])
def files_scene(request: pytest.FixtureRequest, host: HostUnderTest) -> Scene:
    """Where it makes no difference what storage it is."""
    return a_scene(host, request.param)


def a_scene(host: HostUnderTest, backend: str) -> Scene:
    host.set("default_backend", backend)
    image = host.raw_image()
    manager = host.manager()
    # What a child would import is imported here: it is forked off.
    warm = host.instance()
    manager.create(warm)
    manager.snapshot(warm.id, UploadTarget("warm"))
    manager.destroy(warm.id)
    manager.close()
    return Scene(host, manager, host.instance(swap_mb=64), image)


@pytest.mark.field("J5")
def test_create_makes_all_or_nothing(scene: Scene) -> None:
    def verify(outcome: str) -> None:
        data = content(scene)
        disks = scene.rows("SELECT id FROM disks")
        if outcome == "done":
            assert data is not None
        if data is not None:
            assert data == scene.image and len(disks) == 2
        else:
            assert not disks
            assert not scene.rows("SELECT id FROM instances")
        scene.manager.destroy(scene.instance.id)
        assert scene.host.objects() == []

    every_kill(
        scene,
        "create",
        lambda: None,
        lambda manager: manager.create(scene.instance),
        verify,
    )


def test_create_of_an_uncached_image_leaves_a_whole_entry_or_none(
    files_scene: Scene,
) -> None:
    scene = files_scene

    def prepare() -> None:
        scene.manager.destroy(scene.instance.id)
        scene.host.set("cache_max_age", 0, "imagebackend_images")
        time.sleep(0.01)
        list(scene.manager.prune())
        assert scene.manager.cache_entries() == []

    def verify(outcome: str) -> None:
        for entry in scene.manager.cache_entries():
            assert entry.broken == ""
            base = scene.host.path / "cache" / entry.entry / "base.raw"
            assert base.read_bytes() == scene.image

    every_kill(
        scene,
        "create, image not cached",
        prepare,
        lambda manager: manager.create(scene.instance),
        verify,
    )


def test_rebuild_leaves_the_old_disk_or_the_new_one(scene: Scene) -> None:
    def prepare() -> None:
        scene.manager.destroy(scene.instance.id)
        scene.manager.create(scene.instance)
        write_root(scene)

    def verify(outcome: str) -> None:
        data = content(scene)
        assert data in (scene.image, bytes([PATTERN]) * MiB)
        if outcome == "done":
            assert data == scene.image
        assert len(scene.rows("SELECT id FROM disks")) == 2

    every_kill(
        scene,
        "rebuild",
        prepare,
        lambda manager: manager.rebuild(scene.instance),
        verify,
    )


def test_resize_keeps_the_data_at_the_old_size_or_the_new_one(scene: Scene) -> None:
    assert scene.instance.flavor is not None
    flavor = dataclasses.replace(scene.instance.flavor, root_gb=2)
    larger = dataclasses.replace(scene.instance, flavor=flavor)

    def prepare() -> None:
        scene.manager.destroy(scene.instance.id)
        scene.manager.create(scene.instance)
        write_root(scene)

    def verify(outcome: str) -> None:
        assert content(scene) == bytes([PATTERN]) * MiB
        ((size,),) = scene.rows("SELECT size FROM disks WHERE name = 'root'")
        assert size in (1 << 30, 2 << 30)
        if outcome == "done":
            assert size == 2 << 30

    every_kill(scene, "resize", prepare, lambda manager: manager.resize(larger), verify)


def test_snapshot_leaves_a_whole_image_or_none(scene: Scene) -> None:
    target = scene.host.images / "snap.qcow2"
    notes = scene.host.images / "snap.json"

    def prepare() -> None:
        target.unlink(missing_ok=True)
        notes.unlink(missing_ok=True)
        if not scene.rows("SELECT id FROM disks"):
            scene.manager.create(scene.instance)
            write_root(scene)

    def verify(outcome: str) -> None:
        assert target.exists() == notes.exists()
        if outcome == "done":
            assert target.exists()
        if target.exists():
            whole(target, scene)
        assert content(scene) == bytes([PATTERN]) * MiB

    every_kill(
        scene,
        "snapshot",
        prepare,
        lambda manager: manager.snapshot(scene.instance.id, UploadTarget("snap")),
        verify,
    )


def test_destroy_removes_everything_or_can_be_asked_again(scene: Scene) -> None:
    def prepare() -> None:
        if not scene.rows("SELECT id FROM disks"):
            scene.manager.create(scene.instance)

    def verify(outcome: str) -> None:
        disks = scene.rows("SELECT id FROM disks")
        assert len(disks) in (0, 2)
        if outcome == "done":
            assert disks == []

    every_kill(
        scene,
        "destroy",
        prepare,
        lambda manager: manager.destroy(scene.instance.id),
        verify,
    )


def test_destroy_with_a_persistent_disk_is_all_or_nothing(files_scene: Scene) -> None:
    scene = files_scene
    spec = DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)

    def prepare() -> None:
        scene.manager.destroy(scene.instance.id)
        for disk in list(scene.manager.list()):
            scene.manager.delete_disk(disk.id)
        scene.manager.create(scene.instance, [spec])

    def verify(outcome: str) -> None:
        rows = scene.rows("SELECT name, state FROM disks ORDER BY name")
        whole = [("data", "ready"), ("root", "ready"), ("swap", "ready")]
        assert rows in (whole, [("data", "kept")])
        instances = scene.rows("SELECT id FROM instances")
        assert len(instances) == (1 if rows == whole else 0)
        if outcome == "done":
            assert rows == [("data", "kept")]

    every_kill(
        scene,
        "destroy, with a persistent disk",
        prepare,
        lambda manager: manager.destroy(scene.instance.id),
        verify,
        ("unlink,unlinkat", "fsync,fdatasync", "rmdir"),
    )


def test_update_that_grows_keeps_rows_and_storage_equal(files_scene: Scene) -> None:
    scene = files_scene
    small = DiskSpec(name="data", size=MiB, lifecycle=Lifecycle.PERSISTENT)
    large = dataclasses.replace(small, size=2 * MiB)
    more = DiskSpec(name="more", size=MiB, lifecycle=Lifecycle.PERSISTENT)

    def prepare() -> None:
        scene.manager.destroy(scene.instance.id)
        for disk in list(scene.manager.list()):
            scene.manager.delete_disk(disk.id)
        scene.manager.create(scene.instance, [small])

    def verify(outcome: str) -> None:
        names = [name for (name,) in scene.rows("SELECT name FROM disks ORDER BY 1")]
        assert names in (["data", "root", "swap"], ["data", "more", "root", "swap"])
        if outcome == "done":
            assert "more" in names
        scene.manager.update(scene.instance, [large, more])
        sizes = dict(scene.rows("SELECT name, size FROM disks"))
        assert sizes["data"] == 2 * MiB and "more" in sizes

    every_kill(
        scene,
        "update",
        prepare,
        lambda manager: manager.update(scene.instance, [large, more]),
        verify,
        ("vfork,clone,clone3", "link,linkat", "unlink,unlinkat", "fsync,fdatasync"),
    )


@pytest.mark.field("C1")
def test_prune_removes_an_entry_whole_and_never_one_in_use(files_scene: Scene) -> None:
    scene = files_scene
    host = scene.host
    host.set("cache_max_age", 0, "imagebackend_images")
    used = host.instance()
    scene.manager.create(used)
    host.raw_image("unused")

    def prepare() -> None:
        scene.manager.prefetch("unused")

    def verify(outcome: str) -> None:
        entries = {each.image_id: each for each in scene.manager.cache_entries()}
        assert all(each.broken == "" for each in entries.values())
        if host.conf.imagebackend.default_backend == "qcow2":
            assert "raw-image" in entries
        if outcome == "done":
            assert "unused" not in entries
        assert content(scene) == scene.image

    every_kill(scene, "prune", prepare, lambda manager: list(manager.prune()), verify)
