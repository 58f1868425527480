# SPDX-License-Identifier: Apache-2.0
"""Waiting for many things at once, at the cost of one look for all of them."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from imagebackend import exceptions as exc

T = TypeVar("T")
#: A look is not begun again before this many times its own duration,
_REST = 3.0
#: or so many seconds: one that hung until it was given up must not use up everybody's
#: time.
_LONGEST_REST = 30.0


@dataclass(eq=False)
class _Waiter(Generic[T]):
    """One thread's wait; others may wait for the same key.

    :ivar error: what ends it. :ivar silence: why the last look saw nothing.
    """

    key: str
    pause: float
    next_look: float
    seen: list[T | None] = field(default_factory=list)
    error: exc.ImageBackendError | None = None
    silence: exc.StorageUnavailable | None = None


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

        :param done: may raise, which ends the wait. It is shown what each look saw
            that began after this call, once and in order.
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
                seen = self._next(waiter, deadline)
                for last in seen:
                    if done(last):
                        return last
                if waiter.error is not None:
                    # Each thread raises its own: an exception has one traceback.
                    raise copy.copy(waiter.error) from waiter.error
                if not seen:
                    raise late(last) from waiter.silence
        finally:
            with self._changed:
                self._waiters.remove(waiter)

    def _next(self, waiter: _Waiter[T], deadline: float) -> list[T | None]:
        """What was seen for the waiter since it last asked; nothing, if its time is up
        or its wait ends in an error."""
        while True:
            with self._changed:
                while not (waiter.seen or waiter.error or self._is_due(waiter)):
                    now = time.monotonic()
                    if now >= deadline:
                        return []
                    until = deadline
                    if not self._looking:
                        until = min(deadline, self._due(waiter))
                    self._changed.wait(max(0.0, until - now))
                if waiter.seen or waiter.error:
                    # Taken here, since looks go on while ``done`` thinks about it.
                    seen, waiter.seen = waiter.seen, []
                    return seen
                if time.monotonic() >= deadline:
                    return []
                self._looking = True
                all_ = list(self._waiters)
            self._look_for(all_)

    def _due(self, waiter: _Waiter[T]) -> float:
        return max(waiter.next_look, self._rest_until)

    def _is_due(self, waiter: _Waiter[T]) -> bool:
        """Whether it is this waiter's turn to look, for all."""
        return not self._looking and time.monotonic() >= self._due(waiter)

    def _look_for(self, waiters: list[_Waiter[T]]) -> None:
        began = time.monotonic()
        found: Mapping[str, T | None] | None = None
        error: exc.ImageBackendError | None = None
        silence: exc.StorageUnavailable | None = None
        try:
            found = self._look({each.key for each in waiters})
        except exc.StorageUnavailable as raised:
            # It may answer the next time; each waiter has its own deadline.
            silence = raised
        except exc.ImageBackendError as raised:
            error = raised
        except Exception as raised:
            error = exc.InternalError(f"a look failed by {type(raised).__name__}")
            error.__cause__ = raised
        finally:
            now = time.monotonic()
            with self._changed:
                self._looking = False
                rest = min(_REST * (now - began), _LONGEST_REST)
                self._rest_until = now + rest
                for each in waiters:
                    each.pause = min(1.5 * each.pause, self._longest)
                    each.next_look = now + each.pause
                    each.silence = silence
                    # It may not have woken up yet since one before.
                    each.error = each.error or error
                    if found is not None:
                        each.seen.append(found.get(each.key))
                self._changed.notify_all()
