# SPDX-License-Identifier: Apache-2.0
"""The image cache: fetched once, never taken from who uses it, told when it is bad."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebackend import DiskManager, UploadTarget
from imagebackend import exceptions as exc
from imagebackend.backends.qcow2 import Qcow2Backend
from imagebackend.host import Host
from imagebackend.images.base import Readable
from imagebackend.images.cache import CacheEntry, ImageCache
from imagebackend.model import (
    CachedImage,
    DiskState,
    Finding,
    GiB,
    ImageInfo,
    MiB,
    Severity,
)
from tests import image_files as files
from tests.conftest import HostUnderTest
from tests.image_files import MemorySource

GROUP = "imagebackend_images"
DATA = os.urandom(MiB + 5)
FORK = multiprocessing.get_context("fork")


class Cache:
    """A host's cache, and what its disks need."""

    def __init__(self, host: HostUnderTest) -> None:
        self.needed: set[str] = set()
        self.host = Host(host.conf)
        self.cache = ImageCache(host.conf, self.host, lambda: self.needed)

    @property
    def path(self) -> Path:
        return Path(self.cache.path)

    def prune(self, **how: Any) -> dict[str, Finding]:
        """By the entry's image."""
        return {
            each.subject.removeprefix("image cache: "): each
            for each in self.cache.prune(**how)
        }

    def entries(self, **how: Any) -> list[CacheEntry]:
        return list(self.cache.entries(**how))

    def names(self) -> list[str]:
        return [each.entry for each in self.cache.entries()]


@pytest.fixture
def source() -> MemorySource:
    return MemorySource({"image": DATA, "other": DATA[::-1], "third": DATA[1:]})


@pytest.fixture
def here(host: HostUnderTest) -> Cache:
    return Cache(host)


@pytest.fixture
def make_cache(
    make_host: Callable[[str], HostUnderTest], tmp_path: Path
) -> Callable[[str], Cache]:
    """Hosts that share one folder."""

    def make(name: str) -> Cache:
        host = make_host(name)
        host.set("cache_path", str(tmp_path / "shared"), GROUP)
        host.set("cache_max_age", 0, GROUP)
        return Cache(host)

    return make


def fetch(cache: Cache, source: MemorySource, image: str = "image") -> CachedImage:
    return cache.cache.prefetch(source, source.get(image), limit=GiB)


def reboot(cache: Cache) -> None:
    """The kernel has another boot id, and the process is another."""
    cache.host.__dict__["boot_id"] = f"boot-{time.monotonic_ns()}"


def spoil(image: CachedImage, data: bytes | None = None) -> None:
    """As after a power cut: right name and size, and no content."""
    size = os.stat(image.path).st_size
    Path(image.path).write_bytes(bytes(size) if data is None else data)


def forget_look(cache: Cache, image: CachedImage) -> None:
    """The spoilt file looks as it did when it was last looked at."""
    lease = cache.path / image.entry / f"lease.{cache.host.id}"
    facts = os.stat(image.path)
    says = json.loads(lease.read_text())
    says["file"] = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    lease.write_text(json.dumps(says))


# --- one fetch ---------------------------------------------------------------


class CountingSource(MemorySource):
    """Counts over all processes, and takes its time."""

    def __init__(self, images: dict[str, bytes], log: Path) -> None:
        super().__init__(images)
        self.log = log

    @contextlib.contextmanager
    def open(self, info: ImageInfo, *, auth: Any = None) -> Iterator[Readable]:
        with open(self.log, "a") as file:
            file.write("x")
        time.sleep(0.1)
        with super().open(info, auth=auth) as stream:
            yield stream


@pytest.mark.field("C2")
def test_image_is_fetched_once_by_many_threads_of_many_processes(
    host: HostUnderTest, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    source = CountingSource({"image": DATA}, log)
    bad = tmp_path / "bad"

    def use() -> None:
        cache = Cache(host)
        try:
            with cache.cache.use(source, source.get("image"), limit=GiB) as image:
                assert Path(image.path).read_bytes() == DATA
        except BaseException as error:
            bad.write_text(repr(error))

    def threads() -> None:
        running = [threading.Thread(target=use) for _ in range(5)]
        for each in running:
            each.start()
        for each in running:
            each.join()

    children = [FORK.Process(target=threads) for _ in range(8)]
    for child in children:
        child.start()
    threads()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert not bad.exists(), bad.read_text()
    assert log.read_text() == "x"


@pytest.mark.field("C2")
def test_every_version_of_an_image_has_an_entry_of_its_own(
    here: Cache, source: MemorySource
) -> None:
    one = fetch(here, source)
    source.images["image"] = DATA[::-1]
    other = fetch(here, source)
    assert one.entry != other.entry
    assert Path(one.path).read_bytes() == Path(other.path).read_bytes()[::-1]
    assert {each.image_id for each in here.entries()} == {"image"}


def test_second_use_asks_nobody(here: Cache, source: MemorySource) -> None:
    first = fetch(here, source)
    assert fetch(here, source) == first
    assert source.opened == 1
    assert here.cache.lookup(first.entry) == first
    assert here.cache.lookup("none-0123456789abcdef") is None


def test_cache_makes_nothing_before_it_is_used(here: Cache) -> None:
    assert here.entries() == [] and here.cache.strangers() == []
    assert here.prune() == {} and here.cache.sweep() == []
    assert here.cache.hosts() == [] and here.cache.usage() == 0
    assert not here.path.exists()


def test_base_can_be_read_by_qemu_and_written_by_nobody_else(
    here: Cache, source: MemorySource
) -> None:
    old = os.umask(0o077)
    try:
        image = fetch(here, source)
    finally:
        os.umask(old)
    assert os.stat(image.path).st_mode & 0o777 == 0o644
    for folder in (here.path / image.entry, here.path):
        assert folder.stat().st_mode & 0o022 == 0


# --- whoever uses an entry keeps it -----------------------------------------


@pytest.mark.field("C1")
def test_prune_takes_no_entry_that_another_process_uses(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    """The overlay is not there yet, and no row needs the entry."""
    host.set("cache_max_age", 0, GROUP)
    ready, go = FORK.Event(), FORK.Event()

    def use() -> None:
        other = Cache(host)
        with other.cache.use(source, source.get("image"), limit=GiB) as image:
            ready.set()
            go.wait(20)
            assert Path(image.path).read_bytes() == DATA

    child = FORK.Process(target=use)
    child.start()
    assert ready.wait(20)
    (entry,) = here.names()
    finding = here.prune()[entry]
    assert (finding.action, finding.what) == ("kept", "in use right now")
    assert here.names() == [entry]
    go.set()
    child.join()
    assert child.exitcode == 0
    assert here.prune()[entry].action == "removed"
    assert here.names() == []


@pytest.mark.field("C1")
def test_use_and_prune_at_full_speed_never_lose_an_entry_in_use(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    host.set("cache_max_age", 0, GROUP)
    stop = FORK.Event()

    def prune() -> None:
        other = Cache(host)
        while not stop.is_set():
            other.prune()

    child = FORK.Process(target=prune)
    child.start()
    try:
        for _ in range(25):
            with here.cache.use(source, source.get("image"), limit=GiB) as image:
                time.sleep(0.002)
                assert Path(image.path).read_bytes() == DATA
    finally:
        stop.set()
        child.join()
    assert child.exitcode == 0


@pytest.mark.field("C1")
def test_prune_asks_with_the_lock_held_what_is_needed(
    host: HostUnderTest, source: MemorySource
) -> None:
    """A disk whose row was committed while prune looked around keeps its base."""
    host.set("cache_max_age", 0, GROUP)
    seen: list[str] = []

    def in_use() -> set[str]:
        (entry,) = [each.entry for each in cache.entries()]
        with pytest.raises(exc.Busy), cache._locked(entry, shared=True, wait=False):
            pass
        seen.append(entry)
        return {entry}

    cache = ImageCache(host.conf, Host(host.conf), in_use)
    cache.prefetch(source, source.get("image"), limit=GiB)
    (finding,) = cache.prune()
    assert "a disk of this host is based on it" in finding.what
    assert finding.action == "kept" and len(seen) == 1


@pytest.mark.field("C1")
def test_entry_used_after_prune_looked_is_kept(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    fetch(here, source)
    (stale,) = here.entries()
    time.sleep(0.02)
    fetch(here, source)
    assert here.cache._prune_one(stale, "old", False).action == "kept"


def test_lease_is_there_before_the_block_begins(
    here: Cache, source: MemorySource
) -> None:
    with here.cache.use(source, source.get("image"), limit=GiB):
        assert here.entries()[0].leases == (here.host.id,)
    before = here.entries()[0].last_used
    time.sleep(0.02)
    fetch(here, source)
    assert here.entries()[0].last_used > before


@pytest.mark.field("C7")
def test_least_recently_used_goes_first_until_the_cap_holds(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    for image in ("image", "other", "third"):
        fetch(here, source, image)
        time.sleep(0.02)
    fetch(here, source, "image")
    host.set("cache_max_mb", 3, GROUP)
    found = here.prune(dry_run=True)
    assert [each.action for each in found.values()] == ["would be removed"]
    assert len(here.names()) == 3
    found = here.prune()
    assert [name.partition("-")[0] for name in found] == ["other"]
    assert [name.partition("-")[0] for name in here.names()] == ["image", "third"]
    assert here.cache.usage() <= 3 * MiB


@pytest.mark.field("C7")
def test_entry_that_is_kept_does_not_count_as_room_made(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    for image in ("image", "other", "third"):
        here.needed.add(fetch(here, source, image).entry)
        time.sleep(0.02)
    host.set("cache_max_mb", 3, GROUP)
    here.needed = {name for name in here.needed if not name.startswith("third")}
    actions = [each.action for each in here.prune().values()]
    assert actions == ["kept", "kept", "removed"]


@pytest.mark.field("C7")
def test_usage_counts_all_that_the_cache_takes(
    here: Cache, source: MemorySource
) -> None:
    assert here.cache.usage() == 0
    image = fetch(here, source)
    taken = os.stat(image.path).st_blocks * 512
    assert taken <= here.cache.usage() <= taken + 64 * 1024
    (here.path / "tmp" / "half").write_bytes(DATA)
    assert here.cache.usage() >= 2 * taken
    assert here.entries()[0].allocated >= taken


def damage(image: CachedImage, how: str) -> None:
    """Under a good name."""
    if how == "bytes":
        with open(image.path, "r+b") as file:
            file.write(b"not these")
    else:
        os.truncate(image.path, 5)


@pytest.mark.parametrize("how", ["bytes", "size"])
def test_prune_removes_damaged_bytes_that_nobody_needs(
    here: Cache, source: MemorySource, how: str
) -> None:
    good, bad = fetch(here, source), fetch(here, source, "other")
    damage(bad, how)
    assert [each.entry for each in here.entries() if each.broken] == [bad.entry]
    here.needed = {bad.entry}
    assert here.prune().keys() <= {bad.entry}
    here.needed = set()
    assert here.prune(dry_run=True)[bad.entry].action == "would be removed"
    assert {name: each.action for name, each in here.prune().items()} == {
        bad.entry: "removed"
    }
    assert here.names() == [good.entry]


@pytest.mark.parametrize("how", ["bytes", "size"])
@pytest.mark.parametrize("backend", ["qcow2", "raw"])
def test_create_fetches_a_damaged_entry_anew_unless_a_disk_is_based_on_it(
    host: HostUnderTest, manager: DiskManager, backend: str, how: str
) -> None:
    host.set("default_backend", backend)
    data = host.raw_image()
    image = manager.prefetch("raw-image")
    damage(image, how)
    (finding,) = [each for each in manager.audit() if each.severity is not Severity.OK]
    assert image.entry in finding.subject and "prune" in finding.advice
    first = host.instance()
    manager.create(first)
    assert Path(image.path).read_bytes() == data
    damage(image, how)
    if backend == "raw":
        manager.create(host.instance())
        return
    with pytest.raises(exc.IntegrityError, match=image.entry):
        manager.create(host.instance())
    found = [each for each in manager.audit() if "image cache" in each.subject]
    assert "prune" not in found[-1].advice
    assert [each.action for each in manager.prune()] == ["kept"]
    manager.destroy(first.id)
    manager.create(host.instance())


@pytest.mark.parametrize("how", ["size", "gone"])
def test_a_disk_without_its_base_is_used_by_nobody(
    host: HostUnderTest, manager: DiskManager, how: str
) -> None:
    host.raw_image()
    instance, other = host.instance(), host.instance()
    manager.create(instance)
    manager.create(other)
    manager.connect(other.id)
    (entry,) = manager.cache_entries()
    base = Path(host.path, "cache", entry.entry, "base.raw")
    good = base.read_bytes()
    if how == "size":
        os.truncate(base, 5)
    else:
        base.unlink()
    target = UploadTarget("snapshot")
    for verb in (
        lambda: manager.connect(instance.id),
        lambda: manager.libvirt_xml(other.id),
        lambda: manager.snapshot(instance.id, target),
        lambda: manager.resize(host.instance(root_gb=2, id=instance.id)),
    ):
        with pytest.raises(exc.IntegrityError, match=entry.entry):
            verb()
        assert {disk.state for disk in manager.list()} == {DiskState.READY}
    errors = [each for each in manager.audit() if each.severity is Severity.ERROR]
    assert len([each for each in errors if entry.entry in each.what]) == 3
    base.write_bytes(good)
    manager.connect(instance.id)
    for each in (instance, other):
        manager.disconnect(each.id)
        manager.destroy(each.id)


def test_a_disk_that_is_being_made_needs_an_entry_once_something_of_it_is_recorded(
    host: HostUnderTest, manager: DiskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.raw_image()
    seen = []
    store = manager._ctx.store
    real = Qcow2Backend.create

    def create(
        self: Qcow2Backend, gen: Any, fill: Any, record: Any, **more: Any
    ) -> Any:
        def recorded(handle: Any) -> None:
            record(handle)
            look()

        look()
        return real(self, gen, fill, recorded)

    def look() -> None:
        with store.reading() as rows:
            host_id = manager.host_id
            seen.append(
                [len(rows.entries_in_use(host_id, made=made)) for made in (False, True)]
            )

    monkeypatch.setattr(Qcow2Backend, "create", create)
    manager.create(host.instance())
    assert seen == [[1, 0], [1, 1]]


@pytest.mark.field("C6")
def test_blank_disks_need_no_cache_and_nothing_is_left_after_all_are_gone(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.set("cache_max_age", 0, GROUP)
    blank = host.instance(None, root_gb=1, ephemeral_gb=1, swap_mb=64)
    manager.create(blank)
    assert manager.cache_entries() == []
    host.raw_image()
    host.qcow2_image()
    made = [
        host.instance(image, ephemeral_gb=1, swap_mb=64)
        for image in ("raw-image", "qcow2-image", "raw-image")
    ]
    for instance in made:
        manager.create(instance)
    assert len(manager.cache_entries()) == 2
    assert {each.action for each in manager.prune()} == {"kept"}
    for instance in [blank, *made]:
        manager.destroy(instance.id)
    assert {each.action for each in manager.prune()} == {"removed"}
    assert set(os.listdir(host.path / "cache")) <= {"hosts", "locks", "tmp"}
    assert os.listdir(host.path / "cache" / "tmp") == []


# --- hosts that share a folder ----------------------------------------------


@pytest.mark.field("C8")
def test_no_host_takes_what_another_one_has_a_lease_on(
    make_cache: Callable[[str], Cache], source: MemorySource
) -> None:
    """B may be stopped: silence is not consent."""
    a, b = make_cache("a"), make_cache("b")
    image = fetch(a, source)
    assert fetch(b, source) == image and source.opened == 1
    assert a.cache.hosts() == sorted([a.host.id, b.host.id])
    b.needed = {image.entry}
    del b
    for _ in range(3):
        assert a.prune()[image.entry].action == "kept"
    assert Path(image.path).read_bytes() == DATA


@pytest.mark.field("C8")
def test_host_that_only_used_what_was_there_is_registered_too(
    make_cache: Callable[[str], Cache], source: MemorySource
) -> None:
    a, b = make_cache("a"), make_cache("b")
    fetch(a, source)
    fetch(b, source)
    (a.path / "hosts" / b.host.id).stat()
    a.cache.forget_host(b.host.id)
    assert a.cache.hosts() == [a.host.id]
    # It was not gone after all: its next use says so.
    Path(b.cache.path, "hosts").stat()
    fetch(b, source)
    assert b.cache.hosts() == sorted([a.host.id, b.host.id])


@pytest.mark.field("C8", "C6")
def test_hosts_that_need_an_entry_no_more_do_not_wait_for_each_other(
    make_cache: Callable[[str], Cache], source: MemorySource
) -> None:
    a, b = make_cache("a"), make_cache("b")
    image = fetch(a, source)
    fetch(b, source)
    finding = a.prune(dry_run=True)[image.entry]
    assert finding.action == "kept" and len(a.entries()[0].leases) == 2
    finding = a.prune()[image.entry]
    assert finding.action == "kept" and b.host.id in finding.what
    assert a.entries()[0].leases == (b.host.id,)
    assert b.prune()[image.entry].action == "removed"
    assert a.names() == []


@pytest.mark.field("C8")
def test_host_that_is_gone_for_good_can_be_forgotten(
    make_cache: Callable[[str], Cache], source: MemorySource
) -> None:
    a, b = make_cache("a"), make_cache("b")
    image = fetch(b, source)
    assert b.host.id in a.prune()[image.entry].what
    for wrong in (a.host.id, "unheard-of", "../hosts"):
        with pytest.raises(exc.InvalidValue, match=b.host.id):
            a.cache.forget_host(wrong)
    a.cache.forget_host(b.host.id)
    assert a.prune()[image.entry].action == "removed"


@pytest.mark.field("C8", "C4")
def test_host_looks_at_the_bytes_before_it_relies_on_anothers_fetch(
    make_cache: Callable[[str], Cache], source: MemorySource
) -> None:
    a, b = make_cache("a"), make_cache("b")
    image = fetch(a, source)
    spoil(image)
    with pytest.raises(exc.IntegrityError, match=image.entry):
        fetch(b, source)
    assert source.opened == 1, "host A may have disks on it"


# --- bad entries -------------------------------------------------------------


@pytest.mark.field("C4")
@pytest.mark.parametrize("data", [None, DATA[::-1], DATA[:-1], DATA + b"x"])
def test_base_with_other_content_is_flagged_and_fetched_anew(
    here: Cache, source: MemorySource, data: bytes | None
) -> None:
    image = fetch(here, source)
    assert here.entries(verify=True)[0].broken == ""
    spoil(image, data)
    assert image.entry in here.entries(verify=True)[0].broken
    assert Path(fetch(here, source).path).read_bytes() == DATA
    assert source.opened == 2
    assert here.entries(verify=True)[0].broken == ""


@pytest.mark.field("C4")
def test_base_that_was_lost_by_a_power_cut_is_found_after_the_reboot(
    here: Cache, source: MemorySource
) -> None:
    """Name, size and times are as they were noted: only the boot is another."""
    image = fetch(here, source)
    spoil(image)
    forget_look(here, image)
    assert here.entries(verify=True)[0].broken == "", "one boot, one look"
    reboot(here)
    assert "bytes of base.raw" in here.entries(verify=True)[0].broken
    here.needed = {image.entry}
    for _ in range(2):
        with pytest.raises(exc.IntegrityError, match=image.entry):
            fetch(here, source)
    here.needed = set()
    assert Path(fetch(here, source).path).read_bytes() == DATA


def test_bytes_are_looked_at_once_a_boot(here: Cache, source: MemorySource) -> None:
    seen: list[str] = []

    def use() -> None:
        here.cache.prefetch(
            source,
            source.get("image"),
            limit=GiB,
            progress=lambda each: seen.append(each.what),
        )

    use()
    assert set(seen) == {"fetch image"}
    seen.clear()
    use()
    assert seen == []
    reboot(here)
    use()
    assert set(seen) == {"verify image"}
    seen.clear()
    use()
    assert seen == []


@pytest.mark.field("C4", "C10")
@pytest.mark.parametrize(
    "damage",
    ["base gone", "meta gone", "meta garbled", "base is a folder", "base is a link"],
)
@pytest.mark.parametrize("needed", [False, True])
def test_damaged_entry_is_made_anew_unless_a_disk_needs_it(
    here: Cache, source: MemorySource, damage: str, needed: bool
) -> None:
    image = fetch(here, source)
    base, meta = Path(image.path), here.path / image.entry / "meta.json"
    match damage:
        case "base gone":
            base.unlink()
        case "meta gone":
            meta.unlink()
        case "meta garbled":
            meta.write_bytes(b'{"size":')
        case "base is a folder":
            base.unlink()
            base.mkdir()
        case "base is a link":
            base.unlink()
            base.symlink_to("/etc/passwd")
    if needed:
        here.needed = {image.entry}
        with pytest.raises(exc.IntegrityError, match=image.entry):
            fetch(here, source)
        assert source.opened == 1 and here.prune()[image.entry].action == "kept"
    else:
        assert Path(fetch(here, source).path).read_bytes() == DATA
        assert os.listdir(here.path / "tmp") == []


@pytest.mark.field("C10")
@pytest.mark.parametrize(
    "says",
    [
        [],
        None,
        {},
        {"file": "../../etc/passwd"},
        {"file": "/etc/passwd"},
        {"file": "base.qcow2"},
        {"file": 7},
        {"format": None},
        {"format": "qcow2"},
        {"size": "1"},
        {"size": -1},
        {"size": True},
        {"virtual_size": None},
        {"digest": 1},
        {"digest": "none"},
        {"digest": "md5:00"},
        {"image_id": 4},
    ],
)
def test_notes_of_an_entry_that_are_odd_make_it_a_damaged_one(
    here: Cache, source: MemorySource, says: Any
) -> None:
    image = fetch(here, source)
    meta = here.path / image.entry / "meta.json"
    if isinstance(says, dict) and says:
        says = json.loads(meta.read_text()) | says
    meta.write_text(json.dumps(says))
    assert here.entries()[0].broken != ""
    assert here.cache.lookup(image.entry) is None
    assert here.prune()[image.entry].action == "removed"


@pytest.mark.field("C10")
def test_one_odd_thing_hides_no_other_and_is_not_touched(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    good = {fetch(here, source, name).entry for name in source.images}
    here.needed = good
    half = here.path / "half-0123456789abcdef"
    half.mkdir()
    (half / "base.raw").write_bytes(b"half")
    (here.path / "README").write_text("by hand")
    (here.path / "a-folder").mkdir()
    (here.path / "file-0123456789abcdef").write_text("looks like an entry")
    (here.path / "link-0123456789abcdef").symlink_to("/etc")
    (here.path / os.fsdecode(b"\xff")).touch()
    odd = set(here.cache.strangers())
    assert odd == {
        "README",
        "a-folder",
        "file-0123456789abcdef",
        "link-0123456789abcdef",
        os.fsdecode(b"\xff"),
    }
    entries = {each.entry: each for each in here.entries(verify=True)}
    assert set(entries) == good | {half.name}
    assert {name for name, each in entries.items() if each.broken} == {half.name}
    found = here.prune()
    assert {name for name, each in found.items() if each.action == "removed"} == {
        half.name
    }
    for name in odd:
        assert found[name].severity is Severity.WARNING
        assert found[name].action == "left as it is"
    assert set(here.cache.strangers()) == odd
    assert set(here.names()) == good


@pytest.mark.field("C10")
def test_stranger_in_an_entrys_place_is_told_and_kept(
    here: Cache, source: MemorySource
) -> None:
    here.path.mkdir(parents=True)
    place = here.path / here.cache.entry_name(source.get("image"))
    place.write_text("by hand")
    with pytest.raises(exc.ObjectExists, match="in the way"):
        fetch(here, source)
    assert source.opened == 0 and place.read_text() == "by hand"


def test_lease_that_was_being_written_is_nobodys(
    here: Cache, source: MemorySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host killed within that instant must not keep the entry for ever."""
    image = fetch(here, source)
    reboot(here)

    def killed(_one: object, _other: object) -> None:
        os._exit(9)

    def use() -> None:
        os.rename = killed  # type: ignore[assignment]
        fetch(here, source)

    child = FORK.Process(target=use)
    child.start()
    child.join()
    assert child.exitcode == 9
    assert here.entries()[0].leases == (here.host.id,)
    assert here.cache.hosts() == [here.host.id]
    assert len(here.cache.sweep()) == 1
    assert here.cache.needed(image.entry) is False
    assert files_below(here.path) == {
        f"hosts/{here.host.id}",
        f"{image.entry}/base.raw",
        f"{image.entry}/meta.json",
        f"{image.entry}/lease.{here.host.id}",
    }


def files_below(path: Path) -> set[str]:
    return {
        str(each.relative_to(path))
        for each in path.rglob("*")
        if each.is_file() and each.parent.name != "locks"
    }


# --- what dead ones leave ----------------------------------------------------


def test_sweep_removes_what_a_dead_fetch_left_and_no_living_one(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    ready = FORK.Event()

    def hang(_number: int, _data: bytes) -> bytes:
        ready.set()
        time.sleep(60)
        raise AssertionError

    slow = MemorySource(source.images, hang)

    def work() -> None:
        fetch(Cache(host), slow)

    child = FORK.Process(target=work)
    child.start()
    assert ready.wait(20) and child.pid is not None
    tmp = here.path / "tmp"
    (alive,) = os.listdir(tmp)
    dead = {f"dead-{number:016x}.x" for number in range(10)} | {"file"}
    for name in dead:
        (tmp / name).mkdir() if name != "file" else (tmp / name).write_text("x")
    # Now and then one of them has the living one's lock: it waits for the next time.
    swept = here.cache.sweep()
    assert set(swept) <= dead and len(swept) > 7
    assert set(os.listdir(tmp)) == dead - set(swept) | {alive}
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert alive in here.cache.sweep()
    assert os.listdir(tmp) == []
    assert Path(fetch(here, source).path).read_bytes() == DATA


# --- durable -----------------------------------------------------------------


@pytest.mark.field("C4")
def test_everything_is_flushed_before_the_entry_has_its_name(
    here: Cache, source: MemorySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        order.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    def renamed(one: str, other: str) -> None:
        order.append("rename " + os.path.basename(other))
        rename(one, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    image = fetch(here, source)
    place = order.index(f"rename {image.entry}")
    before, after = order[:place], order[place:]
    assert "fsync base.raw" in before
    assert before.index("rename meta.json") < before.index(
        f"rename lease.{here.host.id}"
    )
    assert before[-1].startswith(f"fsync {image.entry}."), "the folder, last of all"
    assert after[1] == "fsync cache"
    # The cache itself was new: it must be there after a power cut as well.
    assert f"fsync {here.path.parent.name}" in before


# --- no room -----------------------------------------------------------------


@contextlib.contextmanager
def small_cache(host: HostUnderTest, size: str = "8m") -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("needs root: mounts")
    folder = host.path / "small"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True
    )
    host.set("cache_path", str(folder), GROUP)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.field("J5")
@pytest.mark.parametrize("format_", ["raw", "qcow2"])
def test_full_file_system_half_way_leaves_nothing(
    host: HostUnderTest, here: Cache, format_: str
) -> None:
    data = os.urandom(6 * MiB) if format_ == "qcow2" else os.urandom(12 * MiB)
    if format_ == "qcow2":
        data = files.make(host.path, "qcow2", data).read_bytes()
    source = MemorySource({"image": data})
    with small_cache(host) as folder:
        with pytest.raises(exc.NoSpace) as caught:
            here.cache.prefetch(source, files.info_of(format_, data), limit=GiB)
        assert caught.value.code == "no-space" and source.opened == 1
        assert os.listdir(folder / "tmp") == [] and here.names() == []
        small = MemorySource({"image": DATA})
        assert Path(fetch(here, small).path).read_bytes() == DATA


@pytest.mark.field("J5")
def test_read_only_file_system_is_told_and_what_is_there_still_listed(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    with small_cache(host) as folder:
        image = fetch(here, source)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        for name in ("image", "other"):
            with pytest.raises(exc.NoSpace, match="read-only"):
                fetch(here, source, name)
        reboot(here)
        with pytest.raises(exc.NoSpace, match="read-only"):
            fetch(here, source)
        assert here.names() == [image.entry] and here.cache.usage() > MiB


@pytest.mark.field("J5")
def test_lease_that_cannot_be_written_leaves_no_half_of_it(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    with small_cache(host, "2m") as folder:
        image = fetch(here, source)
        with contextlib.suppress(OSError), open(folder / "filler", "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        reboot(here)
        with pytest.raises(exc.NoSpace, match="full"):
            fetch(here, source)
        assert os.listdir(folder / "tmp") == []
        (folder / "filler").unlink()
        assert fetch(here, source) == image


def test_cache_path_that_is_a_file_is_told(
    host: HostUnderTest, here: Cache, source: MemorySource
) -> None:
    host.set("cache_path", str(host.config_file), GROUP)
    assert here.entries() == [] and here.cache.sweep() == []
    with pytest.raises(exc.HostError, match="cannot write"):
        fetch(here, source)


# --- no lock left behind -----------------------------------------------------


@pytest.mark.field("C12")
def test_lock_files_are_a_few_however_many_images_there_were(
    here: Cache,
) -> None:
    """Through the locks alone; with fetches in the functional tests."""
    for number in range(2000):
        with here.cache._locked(f"image-{number}", shared=bool(number % 2)):
            pass
    assert len(os.listdir(here.path / "locks")) <= 64


def test_lock_is_free_again_after_a_failure(here: Cache, source: MemorySource) -> None:
    with pytest.raises(exc.SizeRefused):
        here.cache.prefetch(source, source.get("image"), limit=1)
    with (
        pytest.raises(ZeroDivisionError),
        here.cache.use(source, source.get("image"), limit=GiB),
    ):
        raise ZeroDivisionError
    (entry,) = here.names()
    with here.cache._locked(entry, shared=False, wait=False):
        pass


def test_cache_removed_by_hand_is_made_again(here: Cache, source: MemorySource) -> None:
    fetch(here, source)
    shutil.rmtree(here.path)
    assert Path(fetch(here, source).path).read_bytes() == DATA
    assert here.cache.hosts() == [here.host.id]
