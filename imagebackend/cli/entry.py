# SPDX-License-Identifier: Apache-2.0
"""The way in from a shell: streams and signals first, then all that takes time.

Only here are they the process's own; :mod:`imagebackend.cli.app` may be called by any
Python program.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the command; the exit code says which signal ended it, and how it was undone
    is the same for all."""
    came = [signal.SIGINT]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        came[0] = signal.Signals(number)
        raise KeyboardInterrupt

    try:
        for number in _SIGNALS:
            # nohup's word counts.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        _streams()
        from imagebackend.cli.app import main as run

        code = run()
    except KeyboardInterrupt:
        print("imagebackend: interrupted", file=sys.stderr)
        code = _INTERRUPTED
    # What was done stays done, however the process ends.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return 128 + came[0] if code == _INTERRUPTED else code


def _streams() -> None:
    """Whoever closed one wants to see nothing of it, but a file that is opened next
    must not get its place; and no encoding keeps a text from being printed."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: fd
        if getattr(sys, name) is None:
            mode = "w" if fd else "r"
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if stream.errors == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
