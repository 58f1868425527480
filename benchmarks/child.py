# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmarks that need a process of their own, for its memory or to be
many. Prints what it measured as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time

from benchmarks.measure import configuration, instance
from imagebackend import DiskManager
from imagebackend.model import MiB


def fetch(config: str) -> dict[str, float]:
    """Fetch an image into an empty cache."""
    with DiskManager(configuration(config)) as manager:
        # Before the clock: imports, the store, the inspector.
        manager.prefetch("warm")
        start = time.perf_counter()
        manager.prefetch("image")
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "mib": _peak()}


def create(config: str, count: str) -> dict[str, float]:
    """Make instances as fast as it goes."""
    with DiskManager(configuration(config)) as manager:
        list(manager.list())
        print("ready", file=sys.stderr, flush=True)
        sys.stdin.readline()
        for _ in range(int(count)):
            manager.create(instance())
    return {"mib": _peak()}


def audit(config: str) -> dict[str, float]:
    """Audit; the findings are counted and dropped."""
    with DiskManager(configuration(config)) as manager:
        start = time.perf_counter()
        count = sum(1 for _ in manager.audit())
        seconds = time.perf_counter() - start
    return {"findings": count, "seconds": seconds, "mib": _peak()}


def _peak() -> float:
    """Most memory that this process and its children had, MiB."""
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(who).ru_maxrss for who in both) * 1024 / MiB


if __name__ == "__main__":
    name, *args = sys.argv[1:]
    print(json.dumps(globals()[name](*args)))
