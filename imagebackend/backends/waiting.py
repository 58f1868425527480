# SPDX-License-Identifier: Apache-2.0
"""Waiting for many things at once, at the cost of one look for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from imagebackend import exceptions as exc

T = TypeVar("T")
#: A look is not begun again before this many times its own duration.
_REST = 3.0


@dataclass
class _Waiter(Generic[T]):
    key: str
    pause: float
    next_look: float
    seen: list[T | None] = field(default_factory=list)
    error: exc.ImageBackendError | None = None


class Poller(Generic[T]):
    """Threads wait for things by their keys; whichever of them is due looks for all.

    There is no thread of its own: nothing runs when nobody waits.

    :param look: what there is of these keys now, None for one that is absent. What it
        raises as :class:`~imagebackend.exceptions.StorageUnavailable` is a look that
        saw nothing; anything else ends the wait of all.
    :param first: seconds until the first look at a thing; the pause between looks
        grows from there to ``longest``.
    """

    def __init__(
        self,
        look: Callable[[Collection[str]], Mapping[str, T | None]],
        first: float,
        longest: float,
    ) -> None:
        self._look = look
        self._first = first
        self._longest = longest
        self._changed = threading.Condition()
        self._waiters: list[_Waiter[T]] = []
        self._looking = False
        self._rest_until = 0.0

    def wait(
        self,
        key: str,
        done: Callable[[T | None], bool],
        timeout: float,
        late: Callable[[T | None], exc.ImageBackendError],
    ) -> T | None:
        """What was seen of ``key`` when ``done`` said yes.

        :param done: may raise, which ends the wait.
        :param late: makes the exception when ``timeout`` seconds have passed, of what
            was seen last.
        """
        now = time.monotonic()
        deadline = now + timeout
        waiter: _Waiter[T] = _Waiter(key, self._first, now + self._first)
        last: T | None = None
        with self._changed:
            self._waiters.append(waiter)
        try:
            while True:
                self._next(waiter, deadline)
                if waiter.error is not None:
                    raise waiter.error
                for last in waiter.seen:
                    if done(last):
                        return last
                waiter.seen.clear()
                if time.monotonic() >= deadline:
                    raise late(last)
        finally:
            with self._changed:
                self._waiters.remove(waiter)

    def _next(self, waiter: _Waiter[T], deadline: float) -> None:
        """Until something was seen for the waiter, or its time is up."""
        with self._changed:
            while not waiter.seen and waiter.error is None:
                now = time.monotonic()
                if now >= deadline:
                    return
                due = max(waiter.next_look, self._rest_until)
                if self._looking or now < due:
                    until = deadline if self._looking else min(due, deadline)
                    self._changed.wait(max(0.0, until - now))
                    continue
                self._looking = True
                all_ = list(self._waiters)
                break
            else:
                return
        self._look_for(all_)

    def _look_for(self, waiters: list[_Waiter[T]]) -> None:
        began = time.monotonic()
        found: Mapping[str, T | None] | None = None
        error: exc.ImageBackendError | None = None
        try:
            found = self._look({each.key for each in waiters})
        except exc.StorageUnavailable:
            pass  # it may answer the next time; each waiter has its own deadline
        except exc.ImageBackendError as raised:
            error = raised
        finally:
            now = time.monotonic()
            with self._changed:
                self._looking = False
                self._rest_until = now + _REST * (now - began)
                for each in waiters:
                    each.pause = min(1.5 * each.pause, self._longest)
                    each.next_look = now + each.pause
                    each.error = error
                    if found is not None:
                        each.seen.append(found.get(each.key))
                self._changed.notify_all()
