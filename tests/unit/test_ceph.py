# SPDX-License-Identifier: Apache-2.0
"""Calls to Ceph: a deadline for each, and errors that say who can act."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

import pytest

from imagebackend import exceptions as exc
from imagebackend.backends.ceph import READ, Cluster
from imagebackend.model import NetworkHost


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """One that nothing was asked yet, and whose pools are not full."""
    monkeypatch.setattr(Cluster, "_full", lambda *_: "")
    return Cluster("mine", "/nowhere/ceph.conf", "me", 1, 1, "/nowhere/state")


def raising(number: int) -> Callable[[], None]:
    import rados

    def work() -> None:
        raise rados.OSError("its own reason", errno=number)

    return work


@pytest.mark.parametrize(
    ("number", "kind", "wanted"),
    [
        (errno.ENOENT, exc.ObjectMissing, "its own reason"),
        (errno.EEXIST, exc.ObjectExists, "its own reason"),
        (errno.EBUSY, exc.Busy, "its own reason"),
        (errno.ENOTEMPTY, exc.Busy, "its own reason"),
        (errno.EROFS, exc.Busy, "another client has locked it"),
        (errno.EPERM, exc.ConfigError, r"client\.me .*profile rbd-read-only pool=p"),
        (errno.EACCES, exc.ConfigError, r"client\.me .*profile rbd-read-only pool=p"),
        (errno.ENOSPC, exc.StorageFull, "full"),
        (errno.EDQUOT, exc.StorageFull, "full"),
        (errno.ETIMEDOUT, exc.StorageUnavailable, "OSDs up"),
        (errno.ESHUTDOWN, exc.StorageUnavailable, "cut this client off"),
        (errno.ENOTCONN, exc.StorageUnavailable, "cut this client off"),
        (errno.EINVAL, exc.StorageError, "its own reason"),
    ],
    ids=lambda each: errno.errorcode[each] if isinstance(each, int) else None,
)
def test_each_error_says_who_can_act(
    cluster: Cluster, number: int, kind: type[exc.ImageBackendError], wanted: str
) -> None:
    with pytest.raises(kind, match=wanted) as caught:
        cluster.call("look at p/x", raising(number), pool="p", needs=READ)
    assert type(caught.value) is kind
    assert caught.value.message.startswith("backend 'mine': cannot look at p/x: ")


def test_a_timeout_of_a_full_pool_is_said_to_be_that(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "_full", lambda *_: "pool p has reached its quota")
    with pytest.raises(exc.StorageFull, match="reached its quota"):
        cluster.call("write", raising(errno.ETIMEDOUT), pool="p")


def test_a_call_that_hangs_is_left_behind(cluster: Cluster) -> None:
    never = threading.Event()
    since = time.monotonic()
    with pytest.raises(exc.StorageUnavailable, match=r"no answer within 0\.2 s"):
        cluster.call("wait", never.wait, timeout=0.2)
    assert time.monotonic() - since < 30
    never.set()


def test_progress_renews_the_deadline_and_is_passed_on(cluster: Cluster) -> None:
    told: list[tuple[int, int]] = []

    def work(on_progress: Callable[[int, int], int]) -> str:
        for done in range(6):
            time.sleep(0.1)
            assert on_progress(done, 6) == 0
        return "done"

    assert (
        cluster.call(
            "copy", work, timeout=0.4, progress=lambda *each: told.append(each)
        )
        == "done"
    )
    assert told == [(done, 6) for done in range(6)]


def test_a_fault_of_our_own_is_not_taken_for_cephs(cluster: Cluster) -> None:
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cluster.call("count", work)


def test_a_configuration_that_is_not_there_is_named(cluster: Cluster) -> None:
    with pytest.raises(
        exc.ConfigError, match=r"/nowhere/ceph\.conf.*\[mine\] ceph_conf"
    ):
        _ = cluster.fsid


def test_every_monitor_has_its_addresses_of_both_versions(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = {
        "mons": [
            {
                "public_addrs": {
                    "addrvec": [
                        {"type": "v2", "addr": f"{host}:3300"},
                        {"type": "v1", "addr": f"{host}:6789"},
                    ]
                }
            }
            for host in ("10.0.0.1", "[2001:db8::2]")
        ]
    }
    monkeypatch.setattr(Cluster, "command", lambda *_, **__: dump)
    assert cluster.monitors() == (
        NetworkHost("10.0.0.1", 3300),
        NetworkHost("10.0.0.1", 6789),
        NetworkHost("2001:db8::2", 3300),
        NetworkHost("2001:db8::2", 6789),
    )


def test_making_a_cluster_has_no_effect() -> None:
    before = threading.active_count()
    Cluster("mine", "/nowhere/ceph.conf", "me", 1, 1, "/nowhere/state").close()
    assert threading.active_count() == before
