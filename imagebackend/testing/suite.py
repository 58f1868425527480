# SPDX-License-Identifier: Apache-2.0
"""The behaviour suite: every promise of the contract, for any driver.

A driver's author writes a :class:`~imagebackend.testing.harness.Harness` and derives::

    class TestMine(BackendSuite):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(str(tmp_path))

and runs pytest. Nothing here looks at a backend's name: where storages differ, their
capabilities and placements say so first, and the suite holds them to it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import subprocess

import pytest

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.backends.base import (
    Backend,
    Blank,
    FromGeneration,
    FromImage,
    FromSnapshot,
)
from imagebackend.model import (
    Fenced,
    FileSource,
    GiB,
    Marker,
    MiB,
    Severity,
    Way,
)
from imagebackend.testing import harness as h
from imagebackend.testing.harness import Harness, Recorder

_QCOW2 = b"QFI\xfb"


class BackendSuite:
    """Derive from it; the class itself is not collected."""

    @pytest.fixture
    def harness(self) -> Harness:
        raise AssertionError("derive a class and give it a harness fixture")

    @pytest.fixture
    def backend(self, harness: Harness) -> Backend:
        return harness.backend()

    # --- plan and check ----------------------------------------------------------

    def test_check_finds_a_usable_storage_usable(self, backend: Backend) -> None:
        findings = backend.check()
        assert findings
        assert all(each.severity is not Severity.ERROR for each in findings), findings

    def test_plan_has_no_effect(self, harness: Harness, backend: Backend) -> None:
        wanted = h.want(harness)
        first, second = backend.plan(wanted), backend.plan(wanted)
        assert first == second
        assert list(backend.scan()) == []

    def test_plan_gives_at_least_the_size_that_was_asked_for(
        self, harness: Harness, backend: Backend
    ) -> None:
        placement = backend.plan(h.want(harness, size=harness.size - 1))
        granularity = backend.capabilities(placement).granularity
        assert harness.size - 1 <= placement.size < harness.size - 1 + granularity
        assert placement.size % granularity == 0
        assert placement.format in backend.capabilities(placement).formats

    def test_plan_refuses_a_pool_or_type_that_is_not_there(
        self, harness: Harness, backend: Backend
    ) -> None:
        with pytest.raises(exc.PlacementRefused, match="no-such-pool"):
            backend.plan(h.want(harness, pool="no-such-pool"))
        with pytest.raises(exc.PlacementRefused, match="no-such-type"):
            backend.plan(h.want(harness, volume_type="no-such-type"))

    def test_plan_refuses_a_fill_that_is_not_known(
        self, harness: Harness, backend: Backend
    ) -> None:
        with pytest.raises(exc.NotSupported):
            backend.plan(h.want(harness, "FromNowhere"))

    # --- create ------------------------------------------------------------------

    def test_a_blank_disk_has_its_size_and_reads_as_zeros(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        found = backend.stat(gen)
        assert found is not None and found.size == gen.size
        with h.connected(backend, gen) as source:
            assert h.virtual_size(source) == gen.size
            assert h.read(source) == bytes(MiB)
            assert h.read(source, gen.size - MiB) == bytes(MiB)

    @pytest.mark.parametrize("format_", ["raw", "qcow2"])
    def test_a_disk_from_an_image_has_its_bytes_and_zeros_behind(
        self, harness: Harness, backend: Backend, format_: str
    ) -> None:
        data = os.urandom(2 * MiB)
        gen = h.make(harness, backend, FromImage(h.image(harness, data, format_)))
        with h.connected(backend, gen) as source:
            assert h.virtual_size(source) == gen.size
            assert h.read(source, 0, 2 * MiB) == data
            assert h.read(source, 2 * MiB) == bytes(MiB)

    def test_a_formatted_disk_has_its_file_system(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend, Blank("ext4", "label"))
        with h.connected(backend, gen) as source:
            block = h.read(source)
        assert block[1080:1082] == b"\x53\xef"
        assert b"label" in block[1024:2048]

    def test_a_copy_of_another_disk_has_its_bytes(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        with h.connected(backend, gen) as source:
            h.write(source, 0x42, 3 * MiB)
            copy = h.make(harness, backend, FromGeneration(source, gen.size, gen))
        with h.connected(backend, copy) as source:
            assert h.read(source, 3 * MiB) == b"\x42" * MiB
            assert h.read(source) == bytes(MiB)

    def test_a_copy_of_a_file_has_its_bytes(
        self, harness: Harness, backend: Backend
    ) -> None:
        image = h.image(harness, os.urandom(MiB))
        fill = FromGeneration(FileSource(image.path, "raw"), MiB)
        gen = h.make(harness, backend, fill)
        with h.connected(backend, gen) as source, open(image.path, "rb") as file:
            assert h.read(source) == file.read()

    def test_create_again_gives_the_same_object(
        self, harness: Harness, backend: Backend
    ) -> None:
        wanted = h.want(harness)
        gen = h.generation(backend, wanted, backend.plan(wanted))
        recorder = Recorder()
        first = backend.create(gen, Blank(), recorder)
        with h.connected(backend, h.after(gen, first)) as source:
            h.write(source, 0x11)
        for handle in recorder.handles:
            again = harness.backend()
            second = again.create(h.recorded(gen, handle), Blank(), Recorder())
            assert (second.size, second.handle) == (first.size, first.handle)
        assert len(list(backend.scan())) == 1
        with h.connected(backend, h.after(gen, first)) as source:
            assert h.read(source) == b"\x11" * MiB

    def test_create_records_a_handle_that_is_json_and_enough_to_delete_by(
        self, harness: Harness, backend: Backend
    ) -> None:
        wanted = h.want(harness)
        gen = h.generation(backend, wanted, backend.plan(wanted))
        recorder = Recorder()
        creation = backend.create(gen, Blank(), recorder)
        assert recorder.last == creation.handle
        for handle in recorder.handles:
            assert json.loads(json.dumps(handle)) == handle
        first = h.recorded(h.after(gen, creation), recorder.handles[0])
        harness.backend().delete(first)
        assert list(backend.scan()) == []

    def test_create_touches_nothing_foreign(
        self, harness: Harness, backend: Backend
    ) -> None:
        h.make(harness, backend)  # the place exists
        wanted = h.want(harness)
        gen = h.generation(backend, wanted, backend.plan(wanted))
        if not harness.plant(gen):
            assert backend.stat(gen) is None
            return
        before = sorted((each.name, each.allocated) for each in backend.scan())
        with pytest.raises(exc.ObjectExists):
            backend.create(gen, Blank(), Recorder())
        after = sorted((each.name, each.allocated) for each in backend.scan())
        assert after == before

    @pytest.mark.parametrize("call", [1, 2])
    def test_a_create_that_lost_its_generation_leaves_nothing(
        self, harness: Harness, backend: Backend, call: int
    ) -> None:
        wanted = h.want(harness)
        gen = h.generation(backend, wanted, backend.plan(wanted))
        recorder = Recorder(refuse_at=call)
        try:
            creation = backend.create(gen, Blank(), recorder)
        except exc.Superseded:
            assert list(backend.scan()) == []
        else:
            # It records less often; then the handle is complete at once.
            assert len(recorder.handles) < call
            backend.delete(h.after(gen, creation))

    def test_a_fill_that_fails_leaves_nothing(
        self, harness: Harness, backend: Backend
    ) -> None:
        image = h.image(harness, bytes(MiB), fails=True)
        wanted = h.want(harness, "FromImage", image=image.info)
        gen = h.generation(backend, wanted, backend.plan(wanted))
        try:
            backend.create(gen, FromImage(image), Recorder())
        except exc.IntegrityError:
            assert list(backend.scan()) == []
        else:
            # It did not need the image's bytes: the storage has them.
            assert backend.plan(wanted).path is model.Path.CLONE

    def test_many_creates_at_once_are_many_objects(
        self, harness: Harness, backend: Backend
    ) -> None:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda _: h.make(harness, backend), range(8)))
        markers = {each.marker for each in backend.scan()}
        assert markers == {Marker(gen.id, gen.deployment_id) for gen in made}

    # --- delete ------------------------------------------------------------------

    def test_delete_removes_the_object_and_again_is_success(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen, other = h.make(harness, backend), h.make(harness, backend)
        backend.delete(gen)
        backend.delete(gen)
        assert backend.stat(gen) is None
        assert [each.marker for each in backend.scan()] == [
            Marker(other.id, other.deployment_id)
        ]

    def test_delete_of_what_was_never_made_is_success(
        self, harness: Harness, backend: Backend
    ) -> None:
        wanted = h.want(harness)
        gen = h.generation(backend, wanted, backend.plan(wanted))
        backend.delete(gen)
        h.make(harness, backend)
        gen = h.generation(backend, wanted, backend.plan(wanted))
        backend.delete(gen)
        assert len(list(backend.scan())) == 1

    # --- connect -----------------------------------------------------------------

    def test_connect_records_before_use_and_again_gives_no_second_attachment(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        recorder = Recorder()
        first = backend.connect(gen, h.connector(), recorder)
        second = harness.backend().connect(gen, h.connector(), recorder)
        assert len(recorder.handles) == 2
        assert recorder.handles[0] == first.handle == second.handle
        assert json.loads(json.dumps(recorder.last)) == recorder.last
        assert first.source == second.source
        assert first.host_id == h.connector().host_id
        backend.disconnect(gen, first)
        backend.disconnect(gen, second)
        backend.delete(gen)

    def test_what_is_written_is_there_after_a_reconnect(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        with h.connected(backend, gen) as source:
            h.write(source, 0x33, 5 * MiB)
        with h.connected(harness.backend(), gen, "host-2") as source:
            assert h.read(source, 5 * MiB) == b"\x33" * MiB

    def test_connect_of_an_absent_object_says_that_it_is_missing(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        backend.delete(gen)
        with pytest.raises(exc.ObjectMissing):
            backend.connect(gen, h.connector(), Recorder())
        h.make(harness, backend)
        assert backend.stat(gen) is None

    def test_delete_of_a_connected_disk_is_busy_or_leaves_no_trace(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        connection = backend.connect(gen, h.connector(), Recorder())
        try:
            backend.delete(gen)
        except exc.Busy as error:
            assert h.names_host(error.message)
            assert backend.stat(gen) is not None
            backend.disconnect(gen, connection)
            backend.delete(gen)
        assert backend.stat(gen) is None
        assert list(backend.scan()) == []

    def test_a_disk_in_use_by_qemu_is_not_deleted_and_not_grown_behind_its_back(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        connection = backend.connect(gen, h.connector(), Recorder())
        with h.in_use(connection.source):
            with pytest.raises(exc.Busy):
                backend.delete(gen)
            assert backend.stat(gen) is not None
            if backend.capabilities(gen).live_resize is not Way.STORAGE:
                with pytest.raises(exc.Busy):
                    backend.resize(gen, gen.size + GiB)
        backend.disconnect(gen, connection)
        backend.delete(gen)

    # --- stat, scan, capacity ----------------------------------------------------

    def test_a_header_that_a_guest_writes_changes_nothing(
        self, harness: Harness, backend: Backend
    ) -> None:
        evil = os.path.join(harness.folder, "evil.qcow2")
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", evil, "77G"], check=True
        )
        gen = h.make(harness, backend)
        with h.connected(backend, gen) as source:
            h.write_file(source, evil, 65536)
        found = backend.stat(gen)
        assert found is not None and found.size == gen.size
        with h.connected(backend, gen) as source:
            assert h.virtual_size(source) == gen.size
            assert h.read(source)[:4] == _QCOW2
        assert backend.resize(gen, gen.size) == gen.size

    def test_scan_tells_ours_from_another_deployments_and_from_foreign_ones(
        self, harness: Harness, backend: Backend
    ) -> None:
        mine = h.make(harness, backend)
        theirs = h.make(harness, harness.backend("ba9876543210"))
        planted = harness.foreign()
        found = [each.marker for each in backend.scan()]
        assert Marker(mine.id, mine.deployment_id) in found
        assert Marker(theirs.id, "ba9876543210") in found
        assert (None in found) == planted

    def test_what_scan_found_can_be_deleted_by_its_handle(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        (found,) = backend.scan()
        backend.delete(h.recorded(gen, found.handle))
        assert list(backend.scan()) == []

    def test_capacity_names_one_provider_whoever_asks(
        self, harness: Harness, backend: Backend
    ) -> None:
        h.make(harness, backend)
        first, second = backend.capacity(), harness.backend().capacity()
        assert [each.provider for each in first] == [each.provider for each in second]
        assert all(0 <= each.free <= each.total for each in first)
        assert sum(each.used_by_us or 0 for each in first) >= 0

    def test_an_object_of_another_storage_is_a_configuration_error(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = dataclasses.replace(h.make(harness, backend), scope="elsewhere:1")
        for verb in (
            lambda: backend.stat(gen),
            lambda: backend.delete(gen),
            lambda: backend.connect(gen, h.connector(), Recorder()),
        ):
            with pytest.raises(exc.ConfigError, match="elsewhere:1"):
                verb()
        assert len(list(backend.scan())) == 1

    # --- resize ------------------------------------------------------------------

    def test_resize_grows_keeps_the_data_and_again_is_success(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        with h.connected(backend, gen) as source:
            h.write(source, 0x21)
        size = backend.resize(gen, gen.size + MiB)
        granularity = backend.capabilities(gen).granularity
        assert gen.size + MiB <= size < gen.size + MiB + granularity
        assert backend.resize(gen, size) == size
        assert backend.resize(gen, gen.size) == size
        found = backend.stat(gen)
        assert found is not None and found.size == size
        with h.connected(backend, gen) as source:
            assert h.virtual_size(source) == size
            assert h.read(source) == b"\x21" * MiB
            assert h.read(source, gen.size) == bytes(MiB)

    # --- what capabilities promise -----------------------------------------------

    def test_shareable_is_what_the_capability_says(
        self, harness: Harness, backend: Backend
    ) -> None:
        able = backend.capabilities(backend.plan(h.want(harness))).shareable
        if not able:
            with pytest.raises(exc.NotSupported):
                backend.plan(h.want(harness, shareable=True))
            return
        gen = h.make(harness, backend, shareable=True)
        one = backend.connect(gen, h.connector("host-1"), Recorder())
        two = backend.connect(gen, h.connector("host-2"), Recorder())
        h.write(one.source, 0x55)
        assert h.read(two.source) == b"\x55" * MiB
        backend.disconnect(gen, one)
        assert h.read(two.source) == b"\x55" * MiB
        backend.disconnect(gen, two)

    def test_a_second_host_is_refused_only_as_a_conflict(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        with h.connected(backend, gen, "host-1"):
            try:
                other = backend.connect(gen, h.connector("host-2"), Recorder())
            except exc.HostConflict as error:
                assert h.names_host(error.message)
            else:
                backend.disconnect(gen, other)

    def test_snapshot_is_a_point_in_time_or_said_to_be_impossible(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        recorder = Recorder()
        if not backend.capabilities(gen).snapshot:
            with pytest.raises(exc.NotSupported):
                backend.snapshot(gen, "5c1e", recorder)
            return
        with h.connected(backend, gen) as source:
            h.write(source, 0x66)
        taken = backend.snapshot(gen, "5c1e", recorder)
        assert backend.snapshot(gen, "5c1e", recorder) == taken
        with h.connected(backend, gen) as source:
            h.write(source, 0x77)
            assert h.read(source) == b"\x77" * MiB
        copy = h.make(harness, backend, FromSnapshot(gen, taken))
        with h.connected(backend, copy) as source:
            assert h.read(source) == b"\x66" * MiB
        backend.delete(copy)
        backend.delete_snapshot(gen, taken)
        backend.delete_snapshot(gen, taken)
        with h.connected(backend, gen) as source:
            assert h.read(source) == b"\x77" * MiB
        backend.delete(gen)
        assert list(backend.scan()) == []

    def test_revert_brings_size_and_data_back_or_is_said_to_be_impossible(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        capabilities = backend.capabilities(gen)
        if not capabilities.revert:
            snapshot = model.Snapshot("5c1e", gen.id, gen.size)
            with pytest.raises(exc.NotSupported):
                backend.revert(gen, snapshot)
            return
        assert capabilities.snapshot
        with h.connected(backend, gen) as source:
            h.write(source, 0x12)
        taken = backend.snapshot(gen, "5c1e", Recorder())
        backend.resize(gen, 2 * gen.size)
        with h.connected(backend, gen) as source:
            h.write(source, 0x34)
        backend.revert(gen, taken)
        found = backend.stat(gen)
        assert found is not None and found.size == gen.size
        with h.connected(backend, gen) as source:
            assert h.read(source) == b"\x12" * MiB

    def test_reimage_replaces_the_content_or_is_said_to_be_impossible(
        self, harness: Harness, backend: Backend
    ) -> None:
        data = os.urandom(MiB)
        fill = FromImage(h.image(harness, data))
        gen = h.make(harness, backend)
        if not backend.capabilities(gen).reimage:
            with pytest.raises(exc.NotSupported):
                backend.reimage(gen, fill)
            return
        with h.connected(backend, gen) as source:
            h.write(source, 0x12, 0, 4 * MiB)
        backend.reimage(gen, fill)
        with h.connected(backend, gen) as source:
            assert h.read(source, 0, 2 * MiB) == data + bytes(MiB)

    def test_fence_cuts_a_host_off_or_says_that_it_cannot(
        self, harness: Harness, backend: Backend
    ) -> None:
        gen = h.make(harness, backend)
        connection = backend.connect(gen, h.connector(), Recorder())
        host = h.connector().host_id
        answer = backend.fence(gen, host, connection)
        able = backend.capabilities(gen).fence
        assert answer is (Fenced.CUT if able else Fenced.NOT_POSSIBLE)
        if able:
            assert backend.fence(gen, host, connection) is Fenced.CUT
            with pytest.raises(exc.HostConflict):
                backend.connect(gen, h.connector(), Recorder())

    # --- answers that get lost ---------------------------------------------------

    @pytest.mark.parametrize("request_", ["create", "attach", "delete", "extend"])
    def test_a_lost_answer_leaves_no_twin_and_no_leftover(
        self, harness: Harness, backend: Backend, request_: str
    ) -> None:
        lost = harness.lose_answer(request_)
        gen = h.make(harness, backend)
        with h.connected(backend, gen) as source:
            h.write(source, 0x01)
        assert backend.resize(gen, gen.size + GiB) >= gen.size + GiB
        assert len(list(backend.scan())) == 1
        backend.delete(gen)
        assert list(backend.scan()) == []
        # Whatever was to be lost was met by now, or cannot happen in this storage.
        assert lost in (True, False)
