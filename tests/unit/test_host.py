# SPDX-License-Identifier: Apache-2.0
"""Who a host is: an id in a file, whatever the host is called."""

from __future__ import annotations

import os
import socket
import stat
import threading
import uuid
from pathlib import Path

import pytest

from imagebackend import exceptions as exc
from imagebackend.host import Host
from tests.conftest import HostUnderTest


def test_the_id_is_made_once_and_found_again(host: HostUnderTest) -> None:
    first = Host(host.conf).id
    assert str(uuid.UUID(first)) == first
    assert Host(host.conf).id == first
    assert (host.path / "host-id").read_text() == f"{first}\n"


def test_the_id_does_not_follow_the_hosts_name(
    host: HostUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Host(host.conf)
    before = (first.id, first.connector.host_id)
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed.example.org")
    second = Host(host.conf)
    assert (second.id, second.connector.host_id) == before
    assert second.connector.hostname == "renamed.example.org"


def test_threads_that_ask_at_once_get_one_id(host: HostUnderTest) -> None:
    found: list[str] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(Host(host.conf).id)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert [each for each in os.listdir(host.path) if "host-id" in each] == ["host-id"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"my-host\n",
        b"\xff\xfe\x00\x80",
        b"x" * 10**6,
        b"\x1b[2J",
        "ü".encode(),
    ],
    ids=["empty", "blank", "name", "binary", "long", "escape", "utf-8"],
)
def test_an_id_that_is_garbage_is_refused_and_kept(
    host: HostUnderTest, content: bytes
) -> None:
    path = host.path / "host-id"
    path.write_bytes(content)
    with pytest.raises(exc.HostError, match="restore it") as caught:
        _ = Host(host.conf).id
    assert str(path) in caught.value.message and caught.value.message.isprintable()
    assert len(caught.value.message) < 400
    assert path.read_bytes() == content


def test_an_id_that_cannot_be_read_is_a_host_error(host: HostUnderTest) -> None:
    (host.path / "host-id").mkdir()
    with pytest.raises(exc.HostError, match="host-id"):
        _ = Host(host.conf).id


def test_a_state_path_that_cannot_be_made_is_a_host_error(host: HostUnderTest) -> None:
    for path in ("/proc/nothing", str(host.config_file / "state")):
        host.set("state_path", path)
        with pytest.raises(exc.HostError, match=path):
            _ = Host(host.conf).id
        with pytest.raises(exc.HostError, match=path):
            Host(host.conf).folder("locks")


def test_nothing_is_left_of_an_id_that_could_not_be_made(
    host: HostUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(exc.NoSpace, match="full"):
        _ = Host(host.conf).id
    monkeypatch.undo()
    assert [each for each in os.listdir(host.path) if "host-id" in each] == []
    assert Host(host.conf).id


def test_folders_are_private_unless_said_otherwise(host: HostUnderTest) -> None:
    made = Host(host.conf)
    private = Path(made.folder("locks"))
    open_ = Path(made.folder("tmp", "operation", mode=0o711))
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE(open_.stat().st_mode) == 0o711
    assert Path(made.folder("locks")) == private  # again: no harm


def test_a_constructor_has_no_effect(host: HostUnderTest) -> None:
    host.set("state_path", str(host.path / "new"))
    made = Host(host.conf)
    assert made.state_path == str(host.path / "new")
    assert not (host.path / "new").exists()
    assert made.boot_id == Host(host.conf).boot_id
