# SPDX-License-Identifier: Apache-2.0
"""Every request of every verb to a real Cinder, with each thing that can happen to it:
afterwards Cinder has what the rows say.

``doc/source/operator/cinder_faults.rst`` has the outcomes; each run compares. All of
them take long: a part is tried, always the same, unless the environment has

* ``IMAGEBACKEND_FAULTS_EVERY=1``: all of them;
* ``IMAGEBACKEND_FAULTS_WRITE=1``: all, and the page's tables are written anew;
* ``IMAGEBACKEND_FAULTS_WRITE=missing``: what the page has a question mark for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebackend import DiskManager, DiskSpec, Instance, UploadTarget
from imagebackend import exceptions as exc
from imagebackend.backends import cinder as cinder_module
from imagebackend.backends import cinder_volume
from imagebackend.model import Finding, GiB, MiB, Severity
from tests.cinder import CinderUnderTest, unmount
from tests.cloud import wait
from tests.conftest import SUMMARY, HostUnderTest
from tests.functional.test_cinder import agree
from tests.functional.test_glance import Images
from tests.functional.test_verbs import with_root
from tests.functional.test_verbs_remote import FakeGuest
from tests.proxy import OF_CHANGES, Fault, Proxy, proxy_to

WRITE = bool(os.environ.get("IMAGEBACKEND_FAULTS_WRITE"))
#: Only what the page does not have yet.
MISSING = os.environ.get("IMAGEBACKEND_FAULTS_WRITE") == "missing"
EVERY = WRITE or bool(os.environ.get("IMAGEBACKEND_FAULTS_EVERY"))

pytestmark = pytest.mark.timeout(7200 if EVERY else 600)

#: What can be told of rows and Cinder, and compared.
State = tuple[Any, ...]


@pytest.fixture
def proxy(
    host: HostUnderTest, cinder: CinderUnderTest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    """The library's only way to Cinder; it waits less than it would elsewhere."""
    monkeypatch.setattr(cinder_module, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(cinder_volume, "_LOST_PAUSE", 0.05)
    monkeypatch.setattr(cinder_volume, "_PAUSE", 0.1)
    with proxy_to(cinder.api.get_endpoint()) as made:
        with open(host.conf.config_file[0], "a") as file:
            file.write("[imagebackend_images]\nsource = glance\n")
            file.write(cinder.cloud.section("imagebackend_glance"))
        host.enable_cinder(
            cinder, endpoint_override=made.url, poll_first=0.05, poll_longest=0.2
        )
        yield made
    unmount(host.path)


@pytest.fixture
def images() -> Iterator[Images]:
    made = Images()
    yield made
    made.remove()


class Bench:
    """An instance to try verbs on."""

    def __init__(self, host: HostUnderTest, proxy: Proxy, images: Images) -> None:
        assert host.cinder is not None
        self.host, self.proxy, self.cinder = host, proxy, host.cinder
        self.images = images
        self.image = images.upload(
            self.cinder.cloud.admin, os.urandom(MiB), visibility="public"
        )
        self.instance = self.new_instance()
        self.disks: list[DiskSpec] = []
        self.taken = ""

    def new_instance(self) -> Instance:
        return self.host.instance(self.image, imagebackend__volume_type="rbd1")

    # --- what there is before a verb ---------------------------------------------

    def none(self, manager: DiskManager) -> None:
        """No instance, but a request for one."""
        manager.destroy(self.instance.id)
        self.instance = self.new_instance()

    def none_of_a_file_system(self, manager: DiskManager) -> None:
        self.none(manager)
        self.instance = dataclasses.replace(self.instance, flavor=None, image=None)
        self.disks = [DiskSpec(name="data", size=GiB, fs="ext4", volume_type="rbd1")]

    def one(self, manager: DiskManager) -> None:
        """Disconnected."""
        disks = list(manager.list(self.instance.id))
        if any("lost" in disk.handle for disk in disks):
            # Of the former trial: something may come of that for a while.
            self.none(manager)
            disks = []
        if disks:
            manager.disconnect(self.instance.id)
        else:
            manager.create(self.instance, self.disks)

    def one_in_use(self, manager: DiskManager) -> None:
        self.one(manager)
        manager.connect(self.instance.id)

    # --- verbs -------------------------------------------------------------------

    def create(self, manager: DiskManager) -> None:
        manager.create(self.instance, self.disks)

    def connect(self, manager: DiskManager) -> None:
        manager.connect(self.instance.id)

    def disconnect(self, manager: DiskManager) -> None:
        manager.disconnect(self.instance.id)

    def rebuild(self, manager: DiskManager) -> None:
        manager.rebuild(self.instance)

    def resize(self, manager: DiskManager) -> None:
        (root,) = manager.list(self.instance.id)
        manager.resize(with_root(self.instance, root.size // GiB + 1))

    def snapshot(self, manager: DiskManager) -> None:
        manager.snapshot(self.instance.id, self._target("qcow2"))

    def snapshot_of_a_guest(self, manager: DiskManager) -> None:
        guest = FakeGuest(self.instance.id)
        manager.snapshot(self.instance.id, self._target("raw"), guest)

    def destroy(self, manager: DiskManager) -> None:
        manager.destroy(self.instance.id)

    def _target(self, disk_format: str) -> UploadTarget:
        self.taken = str(uuid.uuid4())
        self.images.expect(self.cinder.cloud.admin, self.taken)
        return UploadTarget(self.taken, disk_format)

    # --- what there is -----------------------------------------------------------

    def state(self, manager: DiskManager) -> State:
        disks = [
            (disk.name, disk.size, disk.connected, disk.handle["volume"])
            for disk in manager.list(self.instance.id)
        ]
        image = ""
        if self.taken:
            answer = self.cinder.cloud.admin.image.get(f"/images/{self.taken}")
            if answer.status_code == 200:
                image = answer.json()["status"]
        return (disks, image)


@dataclasses.dataclass(frozen=True)
class Verb:
    """:ivar after: whether a state is what the verb promises, from that before."""

    title: str
    before: Callable[[Bench, DiskManager], None]
    run: Callable[[Bench, DiskManager], None]
    after: Callable[[State, State], bool]


def _present(_before: State, now: State) -> bool:
    return [each[1:3] for each in now[0]] == [(GiB, False)]


def _in_use(before: State, now: State) -> bool:
    return now[0] == [(*each[:2], True, each[3]) for each in before[0]]


def _let_go(before: State, now: State) -> bool:
    return now[0] == [(*each[:2], False, each[3]) for each in before[0]]


def _another(before: State, now: State) -> bool:
    same = [each[:3] for each in before[0]] == [each[:3] for each in now[0]]
    return same and before[0][0][3] != now[0][0][3]


def _larger(before: State, now: State) -> bool:
    (name, size, connected, volume) = before[0][0]
    return bool(now[0] == [(name, size + GiB, connected, volume)])


def _an_image(before: State, now: State) -> bool:
    return bool(before[0] == now[0] and now[1] == "active")


def _gone(_before: State, now: State) -> bool:
    return now[0] == []


VERBS = {
    "create": Verb("create, of an image of Glance", Bench.none, Bench.create, _present),
    "create-blank": Verb(
        "create, of a disk that this host formats",
        Bench.none_of_a_file_system,
        Bench.create,
        _present,
    ),
    "connect": Verb("connect", Bench.one, Bench.connect, _in_use),
    "disconnect": Verb("disconnect", Bench.one_in_use, Bench.disconnect, _let_go),
    "rebuild": Verb("rebuild", Bench.one, Bench.rebuild, _another),
    "resize": Verb("resize, stopped", Bench.one, Bench.resize, _larger),
    "snapshot": Verb("snapshot, stopped", Bench.one, Bench.snapshot, _an_image),
    "snapshot-live": Verb(
        "snapshot, of a guest that runs",
        Bench.one_in_use,
        Bench.snapshot_of_a_guest,
        _an_image,
    ),
    "destroy": Verb("destroy", Bench.one, Bench.destroy, _gone),
}


class Trial:
    """A verb, with one fault at one of its requests."""

    def __init__(self, bench: Bench, verb: Verb) -> None:
        self.bench = bench
        self.verb = verb

    def clean(self) -> list[str]:
        """The verb's requests, when nothing happens to them."""
        before = self._prepare()
        with self.bench.host.manager() as manager:
            self.bench.proxy.forget()
            self.verb.run(self.bench, manager)
            steps = list(self.bench.proxy.steps)
        with self.bench.host.manager() as manager:
            agree(self.bench.host, manager)
            assert self.verb.after(before, self.bench.state(manager))
        return steps

    def __call__(self, step: int, what: str, fault: Fault) -> str:
        bench = self.bench
        before = self._prepare()
        error: exc.ImageBackendError | None = None
        with bench.host.manager() as manager:
            bench.proxy.at(step, fault)
            try:
                self.verb.run(bench, manager)
            except exc.ImageBackendError as raised:
                error = raised
            finally:
                steps, fired = list(bench.proxy.steps), bench.proxy.fired
                bench.proxy.release()
        assert fired and steps[step] == what, f"its requests were {steps}"
        with bench.host.manager() as manager, nothing_comes_late():
            repaired = bool(list(manager.recover(dry_run=False)))
            agree(bench.host, manager)
            for disk in manager.list():
                assert str(disk.state) == "ready", disk
            now = bench.state(manager)
        finished, unchanged = self.verb.after(before, now), before == now
        assert finished or (error is not None and unchanged), (error, before, now)
        if error is None:
            return "swept" if repaired else "done"
        if finished:
            return "healed"
        return "put back" if repaired else "undone"

    def _prepare(self) -> State:
        with self.bench.host.manager() as manager, nothing_comes_late():
            self.bench.taken = ""
            self.verb.before(self.bench, manager)
            return self.bench.state(manager)


@contextlib.contextmanager
def nothing_comes_late() -> Iterator[None]:
    """As if so much time had passed that no request can be on its way any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cinder_volume, "_LATE", 0.0)
        yield


# --- what is tried, and what the docs say of it -------------------------------------


def cases(name: str, steps: list[str]) -> Iterator[tuple[int, Fault]]:
    """Places and faults: all, or a part of them."""
    number = list(VERBS).index(name)
    changes = [step for step, what in enumerate(steps) if not reads(what)]
    for step, what in enumerate(steps):
        for column, fault in enumerate(COLUMNS):
            if reads(what) and fault in OF_CHANGES:
                continue
            turn = column + number
            mine = changes[turn // 2 % len(changes)] == step
            if EVERY or _chosen(what, fault, step + number, turn % 2 == 0 and mine):
                yield step, fault


def _chosen(what: str, fault: Fault, turn: int, mine: bool) -> bool:
    """What leaves most in doubt always, of the rest a few.

    :param mine: it is this request's turn to have the fault.
    """
    if fault is Fault.LOST:
        return not reads(what) or turn % 9 == 0
    if fault in OF_CHANGES:
        # Of two requests for a new thing both may be carried out.
        takes_turns = (Fault.SLOW, Fault.AFTER, Fault.LATE)[turn % 3]
        return what.startswith("POST ") and fault is takes_turns
    return mine


def reads(what: str) -> bool:
    return what.startswith("GET ")


def sent(step: int, fault: Fault) -> Fault:
    """The statuses of one column take turns."""
    errors = (Fault.BUSY, Fault.DOWN, Fault.GATEWAY)
    return errors[step % 3] if fault is Fault.BUSY else fault


COLUMNS = {
    Fault.REFUSED: "refused",
    Fault.BUSY: "5xx",
    Fault.LIMIT: "429",
    Fault.LOST: "lost",
    Fault.CUT: "cut",
    Fault.AFTER: "after",
    Fault.SLOW: "slow",
    Fault.LATE: "late",
}
PAGE = Path(__file__).parents[2] / "doc" / "source" / "operator" / "cinder_faults.rst"
_WIDTH = 46
Outcomes = dict[tuple[int, Fault], str]


def section(title: str, steps: list[str], found: Outcomes) -> str:
    """Of the page."""
    bar = "  ".join(["=" * _WIDTH, *("=" * 8 for _ in COLUMNS)])
    lines = [title, "=" * len(title), "", bar]
    lines.append(_row("request", *COLUMNS.values()))
    lines.append(bar)
    for step, what in enumerate(steps):
        cells = (found.get((step, fault), _none(what, fault)) for fault in COLUMNS)
        lines.append(_row(f"``{what}``", *cells))
    return "\n".join([*lines, bar, ""])


def _none(what: str, fault: Fault) -> str:
    return "\\-" if reads(what) and fault in OF_CHANGES else "?"


def _row(first: str, *cells: str) -> str:
    return "  ".join([f"{first:{_WIDTH}}", *(f"{each:8}" for each in cells)]).rstrip()


def told(title: str) -> tuple[list[str], Outcomes]:
    """Requests and outcomes in the page's section."""
    text = PAGE.read_text().partition(f"\n{title}\n===")[2].partition("\n\n\n")[0]
    rows = [
        re.split("  +", line) for line in text.splitlines() if line.startswith("``")
    ]
    outcomes = {
        (step, fault): cell
        for step, (_, *cells) in enumerate(rows)
        for fault, cell in zip(COLUMNS, cells, strict=True)
    }
    return [what.strip("`") for what, *_ in rows], outcomes


def write_down(title: str, text: str) -> None:
    """The section anew, in the order of the verbs."""
    titles = [verb.title for verb in VERBS.values()]
    head, *sections = re.split(r"\n\n\n", PAGE.read_text().rstrip())
    present = {each.partition("\n")[0]: each for each in sections}
    present[title] = text.rstrip()
    ordered = [present[each] for each in titles if each in present]
    PAGE.write_text("\n\n\n".join([head, *ordered]) + "\n")


@pytest.mark.parametrize("name", VERBS)
def test_whatever_happens_to_a_request_rows_and_cinder_agree_in_the_end(
    host: HostUnderTest, proxy: Proxy, images: Images, name: str
) -> None:
    verb = VERBS[name]
    trial = Trial(Bench(host, proxy, images), verb)
    steps = trial.clean()
    known, outcomes = told(verb.title)
    if not WRITE:
        assert steps == known, f"{PAGE} has other requests"
    began = time.monotonic()
    found: Outcomes = {}
    kept = dict(outcomes) if MISSING and steps == known else {}
    try:
        for step, fault in cases(name, steps):
            if kept.get((step, fault), "?") != "?":
                continue
            with _named(name, step, steps[step], sent(step, fault)):
                found[step, fault] = trial(step, steps[step], sent(step, fault))
                if not WRITE:
                    # What the page does not know must come out well all the same.
                    said = outcomes[step, fault]
                    alike = {found[step, fault], "?"}
                    if fault in OF_CHANGES and alike & {"done", "swept"}:
                        # Who met what came late is a matter of moments.
                        alike |= {"done", "swept"}
                    assert said in alike, f"not as in {PAGE}"
    finally:
        seconds = time.monotonic() - began
        SUMMARY.append(
            f"{name}: {len(found)} faults at {len(steps)} requests in {seconds:.0f} s"
        )
        if WRITE:
            write_down(verb.title, section(verb.title, steps, kept | found))


@contextlib.contextmanager
def _named(name: str, step: int, what: str, fault: Fault) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"{name}, request {step} ({what}): {fault}")
        raise


# --- what comes late ------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["meanwhile", "later"])
def test_of_two_volumes_because_the_first_request_still_ran_one_is_left(
    host: HostUnderTest, proxy: Proxy, images: Images, ends: str
) -> None:
    bench = Bench(host, proxy, images)
    asked = itertools.count(1)
    go = threading.Event()

    def watch(what: str, _token: str) -> None:
        if what == "POST /volumes":
            if next(asked) == 1:
                assert go.wait(120)
            elif ends == "meanwhile":
                go.set()

    with impatient(host, proxy, watch), host.manager() as manager:
        manager.create(bench.instance)
        wait(lambda: ends == "later" or proxy.quiet(), "the first request ends")
        if ends == "later":
            assert len(bench.cinder.volumes()) == 1
            agree(host, manager)
            go.set()
            wait(proxy.quiet, "the first request ends")
            (finding,) = wrong(manager)
            assert "which is another object" in finding.what
            (finding,) = manager.recover(dry_run=False)
            assert finding.what.endswith("removed")
        agree(host, manager)
        assert len(bench.cinder.volumes()) == 1


def test_volumes_that_come_to_be_when_their_create_has_failed_are_purged(
    host: HostUnderTest, proxy: Proxy, images: Images
) -> None:
    bench = Bench(host, proxy, images)
    go = threading.Event()

    def watch(what: str, _token: str) -> None:
        if what == "POST /volumes":
            assert go.wait(120)

    with impatient(host, proxy, watch), host.manager() as manager:
        with pytest.raises(exc.StorageUnavailable):
            manager.create(bench.instance)
        assert list(manager.list()) == [] and bench.cinder.volumes() == []
        (finding,) = wrong(manager)
        assert "may still be carried out" in finding.what
        go.set()
        wait(proxy.quiet, "the requests end")
        assert len(bench.cinder.volumes()) > 1
        assert len(wrong(manager)) == 1
        list(manager.recover(dry_run=False))
        assert bench.cinder.volumes() == []
        # More may come: it is known for as long.
        assert len(wrong(manager)) == 1
        with nothing_comes_late():
            list(manager.recover(dry_run=False))
        agree(host, manager)


def wrong(manager: DiskManager) -> list[Finding]:
    return [each for each in manager.audit() if each.severity is not Severity.OK]


@contextlib.contextmanager
def impatient(
    host: HostUnderTest, proxy: Proxy, watch: Callable[[str, str], int | None]
) -> Iterator[None]:
    """The library waits a few seconds for an answer."""
    option(host, "timeout", 5)
    proxy.watch = watch
    try:
        yield
    finally:
        proxy.watch = None


def option(host: HostUnderTest, name: str, value: object) -> None:
    """Of Cinder's group, in the file, as an operator sets it."""
    with open(host.conf.config_file[0], "a") as file:
        file.write(f"[cinder]\n{name} = {value}\n")
    host.conf.reload_config_files()


# --- other things that go wrong -------------------------------------------------------


@pytest.mark.parametrize("moment", ["GET /volumes/{id}", "POST /attachments"])
def test_a_token_that_ends_while_something_is_waited_for_is_made_anew(
    host: HostUnderTest, proxy: Proxy, images: Images, moment: str
) -> None:
    bench = Bench(host, proxy, images)
    identity = bench.cinder.cloud.admin.identity
    ended: set[str] = set()
    good: set[str] = set()

    def watch(what: str, token: str) -> int | None:
        if what == moment and not ended:
            ended.add(token)
            answer = identity.delete("/auth/tokens", headers={"X-Subject-Token": token})
            assert answer.status_code == 204, answer.text
        # Cinder believes in a token for as long as it has it in its cache.
        if token in ended:
            return 401
        good.add(token)
        return None

    with host.manager() as manager:
        proxy.watch = watch
        manager.create(bench.instance)
        assert len(ended) == 1 and good - ended
        agree(host, manager)
        manager.destroy(bench.instance.id)


def test_where_no_volume_service_takes_it_the_reason_is_told_and_nothing_is_left(
    host: HostUnderTest, proxy: Proxy, images: Images, cinder: CinderUnderTest
) -> None:
    bench = Bench(host, proxy, images)
    with cinder.type_of("no-such-backend") as nowhere, host.manager() as manager:
        lost = host.instance(bench.image, imagebackend__volume_type=nowhere)
        with pytest.raises(exc.StorageError, match="weighted backend"):
            manager.create(lost)
        assert cinder.volumes() == [] and list(manager.list()) == []
        agree(host, manager)
