# SPDX-License-Identifier: Apache-2.0
"""Waiting for many things by one look at all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagebackend import exceptions as exc
from imagebackend.backends.waiting import Poller

#: Long enough for a thread to have got somewhere, however busy the machine is.
PATIENCE = 20.0
FIRST, LONGEST = 0.005, 0.01


class Clock:
    """Time that passes only while something waits for it, in one thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("imagebackend.backends.waiting.time", self)

    def monotonic(self) -> float:
        return self.now

    def of(self, poller: Poller[str]) -> Poller[str]:
        poller._changed = _Changed(self)
        return poller


class _Changed(threading.Condition):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.now += timeout
        return False


class Storage:
    """What is looked at: a value for each key, and each look's keys."""

    def __init__(self) -> None:
        self.now: dict[str, str] = {}
        self.looks: list[set[str]] = []
        self.errors: list[Exception] = []
        self.threads: set[int] = set()
        #: Set: a look waits for it before it answers.
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self._running = threading.Lock()

    def look(self, keys: Collection[str]) -> Mapping[str, str | None]:
        # Two looks at once would be one too many.
        assert self._running.acquire(blocking=False)
        try:
            self.looks.append(set(keys))
            self.threads.add(threading.get_ident())
            found = {key: self.now.get(key) for key in keys}
            self.inside.set()
            assert self.gate.wait(PATIENCE)
            if self.errors:
                raise self.errors.pop(0)
            return found
        finally:
            self._running.release()


def is_ready(seen: str | None) -> bool:
    return seen == "ready"


def too_late(seen: str | None) -> exc.ImageBackendError:
    return exc.StorageUnavailable(f"last seen: {seen}")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def poller(storage: Storage) -> Poller[str]:
    return Poller(storage.look, FIRST, LONGEST)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def waiting(
    pool: ThreadPoolExecutor,
    poller: Poller[str],
    key: str,
    timeout: float = PATIENCE,
    done: Callable[[str | None], bool] = is_ready,
) -> Future[str | None]:
    """Wait for a key in a thread; it is among the waiters when this returns."""
    before = len(poller._waiters)
    future = pool.submit(poller.wait, key, done, timeout, too_late)
    until(lambda: len(poller._waiters) > before or future.done())
    return future


def ended(*futures: Future[str | None]) -> None:
    assert not wait(futures, PATIENCE).not_done


def test_one_look_is_for_all_who_wait(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    keys = {f"key-{number}" for number in range(40)}
    futures = [waiting(pool, poller, key) for key in keys]
    begun = len(storage.looks)
    until(lambda: len(storage.looks) >= begun + 2)
    assert storage.looks[-1] == keys
    storage.now = dict.fromkeys(keys, "ready")
    ended(*futures)
    assert {each.result() for each in futures} == {"ready"}


def test_nobody_looks_when_nobody_waits(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    threads = threading.active_count()
    storage.now["a"] = "ready"
    assert poller.wait("a", is_ready, PATIENCE, too_late) == "ready"
    assert threading.active_count() == threads
    assert not poller._waiters
    looked = len(storage.looks)
    time.sleep(5 * LONGEST)
    assert len(storage.looks) == looked


def test_the_pause_between_looks_grows_up_to_its_limit(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    at: list[float] = []

    def look(keys: Collection[str]) -> Mapping[str, str | None]:
        at.append(clock.now)
        return dict.fromkeys(keys, "busy")

    poller = clock.of(Poller(look, 1.0, 4.0))
    with pytest.raises(exc.StorageUnavailable, match="busy"):
        poller.wait("a", is_ready, 20.0, too_late)
    gaps = [after - before for before, after in zip([0.0, *at], at, strict=False)]
    assert gaps[:6] == [1.0, 1.5, 2.25, 3.375, 4.0, 4.0]


def test_a_slow_look_is_not_begun_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    at: list[float] = []

    def look(keys: Collection[str]) -> Mapping[str, str | None]:
        at.append(clock.now)
        clock.now += 5.0
        return dict.fromkeys(keys, "busy")

    poller = clock.of(Poller(look, 1.0, 2.0))
    with pytest.raises(exc.StorageUnavailable):
        poller.wait("a", is_ready, 50.0, too_late)
    assert at[:3] == [1.0, 21.0, 41.0]


def test_after_a_look_that_hung_the_next_one_is_still_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Three times three minutes of rest would be beyond every deadline.
    clock = Clock(monkeypatch)
    looks: list[float] = []

    def look(keys: Collection[str]) -> Mapping[str, str | None]:
        looks.append(clock.now)
        if len(looks) == 1:
            clock.now += 180.0
            raise exc.StorageUnavailable("no answer")
        return dict.fromkeys(keys, "ready")

    poller = clock.of(Poller(look, 1.0, 2.0))
    assert poller.wait("a", is_ready, 300.0, too_late) == "ready"
    assert looks[1] - looks[0] <= 180.0 + 30.0


def test_each_deadline_is_its_own(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    long = waiting(pool, poller, "long")
    storage.now["short"] = "busy"
    short = waiting(pool, poller, "short", 0.05)
    ended(short)
    with pytest.raises(exc.StorageUnavailable, match="last seen: busy"):
        short.result()
    assert not long.done()
    storage.now["long"] = "ready"
    ended(long)
    assert long.result() == "ready"


def test_a_deadline_passes_also_while_another_thread_looks(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    storage.gate.clear()
    looker = waiting(pool, poller, "a")
    assert storage.inside.wait(PATIENCE)
    short = waiting(pool, poller, "b", 0.02)
    ended(short)
    with pytest.raises(exc.StorageUnavailable, match="last seen: None"):
        short.result()
    storage.now["a"] = "ready"
    storage.gate.set()
    ended(looker)


def test_what_is_late_says_why_nothing_was_seen(
    storage: Storage, poller: Poller[str]
) -> None:
    storage.errors = [exc.StorageUnavailable("503")] * 1000
    with pytest.raises(exc.StorageUnavailable, match="last seen: None") as caught:
        poller.wait("a", is_ready, 0.05, too_late)
    assert str(caught.value.__cause__) == "503"


def test_an_error_of_done_ends_only_its_own_wait(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    def fails(seen: str | None) -> bool:
        raise exc.IntegrityError(f"not as it should be: {seen}")

    other = waiting(pool, poller, "a")
    storage.now["b"] = "broken"
    failing = waiting(pool, poller, "b", done=fails)
    ended(failing)
    with pytest.raises(exc.IntegrityError, match="broken"):
        failing.result()
    assert not other.done()
    storage.now["a"] = "ready"
    ended(other)
    assert other.result() == "ready"


def test_a_storage_that_does_not_answer_is_asked_again(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    storage.errors = [exc.StorageUnavailable("503") for _ in range(3)]
    storage.now = {"a": "ready", "b": "ready"}
    futures = [waiting(pool, poller, key) for key in ("a", "b")]
    ended(*futures)
    assert [each.result() for each in futures] == ["ready", "ready"]
    assert len(storage.looks) >= 4


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (exc.ConfigError("refused"), exc.ConfigError),
        (ZeroDivisionError("a fault of ours"), exc.InternalError),
    ],
)
def test_any_other_error_of_a_look_ends_the_wait_of_all(
    storage: Storage,
    poller: Poller[str],
    pool: ThreadPoolExecutor,
    raised: Exception,
    kind: type[Exception],
) -> None:
    storage.gate.clear()
    first = waiting(pool, poller, "a")
    assert storage.inside.wait(PATIENCE)
    others = [waiting(pool, poller, f"b{number}") for number in range(5)]
    # The look that runs is not theirs, and it ends in nothing; all share the next.
    storage.errors = [exc.StorageUnavailable("503"), raised]
    storage.gate.set()
    ended(first, *others)
    for each in (first, *others):
        assert isinstance(each.exception(), kind)
    # One exception in many threads would have the tracebacks of them all.
    assert len({id(each.exception()) for each in (first, *others)}) == 6
    assert storage.looks == [{"a"}, {"a", *(f"b{number}" for number in range(5))}]


def test_an_error_is_not_forgotten_by_the_next_look(storage: Storage) -> None:
    poller: Poller[str] = Poller(storage.look, FIRST, LONGEST)
    # A waiter that has not woken up yet when the next look has ended as well.
    from imagebackend.backends.waiting import _Waiter

    slow: _Waiter[str] = _Waiter("slow", FIRST, 0.0)
    storage.errors = [exc.ConfigError("refused")]
    poller._look_for([slow])
    poller._look_for([slow])
    assert isinstance(slow.error, exc.ConfigError)


def test_who_joins_while_a_look_runs_gets_the_next_one(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    storage.gate.clear()
    storage.now["a"] = "ready"
    first = waiting(pool, poller, "a")
    assert storage.inside.wait(PATIENCE)
    # What this look has seen of b is of before it was waited for.
    joined = waiting(pool, poller, "b")
    storage.now["b"] = "ready"
    storage.gate.set()
    ended(first, joined)
    assert (first.result(), joined.result()) == ("ready", "ready")
    assert storage.looks[0] == {"a"}
    assert storage.looks[-1] == {"b"}


def test_who_has_left_while_it_was_looked_for_disturbs_nobody(
    pool: ThreadPoolExecutor,
) -> None:
    left = threading.Event()
    looked_for = threading.Event()

    def look(keys: Collection[str]) -> Mapping[str, str | None]:
        assert keys == {"a", "gone"}
        looked_for.set()
        assert left.wait(PATIENCE)
        return dict.fromkeys(keys, "ready")

    poller: Poller[str] = Poller(look, 2 * PATIENCE, 2 * PATIENCE)
    looker = waiting(pool, poller, "a")
    leaving = waiting(pool, poller, "gone", 0.1)
    with poller._changed:
        # It is the other's turn, now that both are there.
        poller._waiters[0].next_look = 0.0
        poller._changed.notify_all()
    ended(leaving)
    assert looked_for.is_set()
    assert isinstance(leaving.exception(), exc.StorageUnavailable)
    left.set()
    ended(looker)
    assert looker.result() == "ready"
    assert not poller._waiters


def test_two_may_wait_for_the_same_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock too coarse to tell them apart, and a wait that ends while the other goes
    # on: what leaves the list must be the one that leaves.
    storage = Storage()
    poller: Poller[str] = Poller(storage.look, FIRST, LONGEST)
    from imagebackend.backends.waiting import _Waiter

    assert _Waiter("a", FIRST, 0.0) != _Waiter("a", FIRST, 0.0)
    with ThreadPoolExecutor(20) as pool:
        storage.now["a"] = "ready"
        for _ in range(20):
            futures = [
                pool.submit(poller.wait, "a", is_ready, PATIENCE, too_late)
                for _ in range(20)
            ]
            ended(*futures)
            assert {each.result() for each in futures} == {"ready"}
    assert not poller._waiters


def test_looks_never_overlap(storage: Storage, pool: ThreadPoolExecutor) -> None:
    """All are due at the same moment, and a look takes a while."""
    storage.gate = _Slow()
    poller: Poller[str] = Poller(storage.look, FIRST, FIRST)
    futures = [waiting(pool, poller, f"key-{number}") for number in range(20)]
    begun = len(storage.looks)
    until(lambda: len(storage.looks) >= begun + 5 or futures[0].done())
    storage.now = {f"key-{number}": "ready" for number in range(20)}
    ended(*futures)
    assert {each.result() for each in futures} == {"ready"}


class _Slow(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(0.003)
        return True


def test_what_is_seen_while_done_thinks_is_not_lost(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    """Each look's answer is shown once, in order, also those of meanwhile."""
    shown: list[str | None] = []

    def slow(seen: str | None) -> bool:
        shown.append(seen)
        if len(shown) == 1:
            looks = len(storage.looks)
            # The other waiter goes on looking, for this one as well.
            until(lambda: len(storage.looks) >= looks + 3)
        return seen == "3"

    counted = 0
    look = storage.look

    def counting(keys: Collection[str]) -> Mapping[str, str | None]:
        nonlocal counted
        counted += 1
        storage.now["slow"] = str(counted)
        return look(keys)

    poller._look = counting
    other = waiting(pool, poller, "other")
    first = waiting(pool, poller, "slow", done=slow)
    ended(first)
    storage.now["other"] = "ready"
    ended(other)
    assert shown == [str(int(str(shown[0])) + each) for each in range(len(shown))]


def test_a_look_after_the_deadline_still_counts(
    storage: Storage, poller: Poller[str], pool: ThreadPoolExecutor
) -> None:
    storage.gate.clear()
    storage.now["a"] = "ready"
    future = waiting(pool, poller, "a", 0.02)
    assert storage.inside.wait(PATIENCE)
    time.sleep(0.03)
    storage.gate.set()
    ended(future)
    assert future.result() == "ready"


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcde"),
            st.integers(0, 12),
            st.sampled_from(["ends", "raises", "times out"]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.sets(st.integers(0, 20), max_size=8),
)
def test_every_wait_ends_and_as_it_should(
    waits: list[tuple[str, int, str]], silent: set[int]
) -> None:
    """Whoever joins when, and whichever looks get no answer: no wake-up is lost."""
    looks = 0

    def look(keys: Collection[str]) -> Mapping[str, int | None]:
        nonlocal looks
        looks += 1
        if looks in silent:
            raise exc.StorageUnavailable("503")
        return dict.fromkeys(keys, looks)

    poller: Poller[int] = Poller(look, 0.0005, 0.001)

    def one(key: str, after: int, how: str) -> str:
        time.sleep(after / 2000)
        seen: list[int | None] = []

        def done(value: int | None) -> bool:
            seen.append(value)
            if how == "raises":
                raise exc.IntegrityError("so said")
            return how == "ends" and len(seen) > after % 3

        def late(_: int | None) -> exc.ImageBackendError:
            return exc.Busy("late")

        try:
            timeout = 0.004 if how == "times out" else PATIENCE
            poller.wait(key, done, timeout, late)
        except exc.IntegrityError:
            return "raises"
        except exc.Busy:
            return "times out"
        finally:
            # In the order of the looks, none of them twice.
            assert seen == sorted({each for each in seen if each is not None})
        return "ends"

    with ThreadPoolExecutor(len(waits)) as pool:
        futures = [pool.submit(one, *each) for each in waits]
        assert not wait(futures, PATIENCE).not_done
    assert [each.result() for each in futures] == [how for *_, how in waits]
    assert not poller._waiters
    assert not poller._looking
