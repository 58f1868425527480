# SPDX-License-Identifier: Apache-2.0
"""What it costs to wait for many volumes at once: requests, and CPU time.

Against the tests' own Cinder, which holds the same 200 volumes in all cases, so that
the list is as long however many wait: what differs is what the poller itself costs.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import BenchHost, Result
from imagebackend.backends.cinder_volume import CinderBackend
from imagebackend.host import Host
from imagebackend.model import JSON
from tests.cinder_stub import CinderStub

_VOLUMES = 200
_WAITERS = (10, 50, _VOLUMES)
_ROUNDS = 3
_DEPLOYMENT = "b" * 12


@dataclass(frozen=True)
class _Round:
    """:ivar requests: for each answer that one waiter was shown. :ivar cpu: seconds of
    all waiting threads, for each of these."""

    requests: float
    cpu: float


def cinder_poll(folder: Path, runs: int) -> list[Result]:
    with CinderStub() as stub:
        host = BenchHost(folder, _section(stub))
        host.conf.register_opts(list(CinderBackend.OPTIONS), "cinder")
        backend = CinderBackend("cinder", host.conf, _DEPLOYMENT)
        metadata = {
            "imagebackend_deployment": _DEPLOYMENT,
            "imagebackend_host": Host(host.conf).id,
        }
        for _ in range(_VOLUMES):
            stub.add_volume(metadata=metadata, status="creating")
        _round(stub, backend, _WAITERS[0], 3)  # connects
        rounds: dict[int, list[_Round]] = {count: [] for count in _WAITERS}
        for _ in range(_ROUNDS):
            for count, found in rounds.items():
                found.append(_round(stub, backend, count, max(10, runs)))
        backend.close()
    requests = max(each.requests for found in rounds.values() for each in found)
    cpu = {
        count: statistics.median(each.cpu for each in found)
        for count, found in rounds.items()
    }
    what = f"GETs for each time that all of them look, at most {_VOLUMES} wait"
    few, many = _WAITERS[0], _WAITERS[-1]
    return [
        Result("cinder, waiting", what, round(requests, 2), None, 1, "x"),
        *(
            Result(f"  CPU a look, {count} wait", "", cpu[count], None, None)
            for count in _WAITERS
        ),
        Result(
            f"  {many} beside {few}",
            f"the same list of {_VOLUMES} volumes, {few} wait",
            cpu[many],
            cpu[few],
            None,
        ),
    ]


def _section(stub: CinderStub) -> str:
    options = {**stub.options, "poll_first": 0.05, "poll_longest": 0.1}
    lines = [f"{key} = {value}" for key, value in options.items()]
    return "\n".join(["[cinder]", *lines, ""])


def _round(stub: CinderStub, backend: CinderBackend, count: int, looks: int) -> _Round:
    """So many threads wait, until each was shown ``looks`` answers."""
    before = len(stub.requests)
    shown = [0] * count
    cpu = [0.0] * count
    errors: list[BaseException] = []
    begin = threading.Barrier(count)
    enough = threading.Event()

    def wait(number: int, volume_id: str) -> None:
        def done(_: JSON | None) -> bool:
            shown[number] += 1
            if min(shown) >= looks:
                enough.set()
            return enough.is_set()

        try:
            begin.wait()
            start = time.thread_time()
            backend._cinder.wait(volume_id, done, 120, "the benchmark ends")
            cpu[number] = time.thread_time() - start
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=wait, args=each)
        for each in enumerate(list(stub.volumes)[:count])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    # Who had its answer a moment before there were enough looks once more.
    requests = len(stub.requests) - before - 1
    return _Round(requests / max(shown), sum(cpu) / max(shown))


CASES: dict[str, Callable[[Path, int], list[Result]]] = {"cinder-poll": cinder_poll}
