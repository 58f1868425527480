# SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal; nothing anywhere else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from imagebackend.cli import output

if TYPE_CHECKING:
    from imagebackend.model import Progress

_INTERVAL = 0.1
_WIDEST_BAR = 40
_PERCENT = len("[] 100%")


class Bar:
    """One line that is drawn over itself; called from any thread."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._what = ""
        self._due = 0.0
        self._drawn = 0

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            now = self._clock()
            if progress.what == self._what and now < self._due:
                return
            self._what, self._due = progress.what, now + _INTERVAL
            self._draw(line(progress, _columns(self._stream) - 1))

    def erase(self) -> None:
        """Leave the line as if there had been no bar. The next call draws again."""
        with self._lock:
            if self._drawn:
                self._write(f"\r{' ' * self._drawn}\r")
                self._drawn = 0
            self._what = ""

    def _draw(self, text: str) -> None:
        # Blanks instead of an escape sequence: right on every terminal.
        self._write(f"\r{text.ljust(self._drawn)}")
        self._drawn = len(text)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def line(progress: Progress, columns: int) -> str:
    """What is shown of it, in at most so many columns."""
    what = output.escape(progress.what)
    if progress.total <= 0:
        return f"{what} {output.size(progress.done)}"[: max(columns, 0)]
    done = min(max(progress.done / progress.total, 0.0), 1.0)
    width = min(columns - len(what) - _PERCENT - 1, _WIDEST_BAR)
    bar = "#" * int(done * width)
    shown = f"[{bar.ljust(width, '.')}] " if width > 0 else ""
    return f"{what} {shown}{int(done * 100):3d}%"[: max(columns, 0)]


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
