# SPDX-License-Identifier: Apache-2.0
"""Files on this host: copies keep holes and content, digests tell content only."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagebackend import exceptions as exc
from imagebackend import local_files
from imagebackend.local_files import (
    ContentDigest,
    copy_sparse,
    data_ranges,
    digest_of,
    fsync_path,
)
from imagebackend.model import KiB, MiB

PAGE = 4 * KiB
BLOCK = 64 * KiB

#: A file as pieces: how long, and whether random bytes, written zeros or a hole.
pieces = st.lists(
    st.tuples(
        st.one_of(
            st.integers(1, 3 * BLOCK),
            st.integers(1, 40).map(lambda pages: pages * PAGE),
            st.sampled_from([1, 511, 512, PAGE, BLOCK, BLOCK - 1, MiB]),
        ),
        st.sampled_from("dzh"),
    ),
    max_size=12,
)


def written(path: Path, layout: list[tuple[int, str]], seed: bytes = b"x") -> bytes:
    """The file, and what it reads as."""
    whole = bytearray()
    with open(path, "wb") as file:
        for number, (length, kind) in enumerate(layout):
            piece = bytes(length)
            if kind == "d":
                piece = hashlib.shake_128(seed + bytes([number])).digest(length)
            if kind == "h":
                file.seek(length, os.SEEK_CUR)
            else:
                file.write(piece)
            whole += piece
        file.truncate(len(whole))
    return bytes(whole)


def copied(source: Path, target: Path) -> bool:
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        return copy_sparse(str(source), fd)
    finally:
        os.close(fd)


def streamed(data: bytes) -> str:
    content = ContentDigest()
    for start in range(0, len(data), MiB):
        content.update(start, data[start : start + MiB])
    return content.text(len(data))


@pytest.mark.field("C4")
@settings(max_examples=150, deadline=None)
@given(layout=pieces)
def test_digest_does_not_see_how_zeros_are_stored(
    layout: list[tuple[int, str]],
) -> None:
    """Holes come in pages and the digest in blocks: a block with several holes counts
    once."""
    with tempfile.TemporaryDirectory() as folder:
        sparse, dense = Path(folder, "sparse"), Path(folder, "dense")
        data = written(sparse, layout)
        dense.write_bytes(data)
        wanted = streamed(data)
        assert digest_of(str(sparse)) == wanted
        assert digest_of(str(dense)) == wanted


@settings(max_examples=60, deadline=None)
@given(layout=pieces)
def test_copy_has_the_same_content_length_and_no_more_data(
    layout: list[tuple[int, str]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        data = written(source, layout)
        copied(source, target)
        assert target.read_bytes() == data
        assert target.stat().st_blocks <= source.stat().st_blocks + 2 * BLOCK // 512
        assert digest_of(str(target)) == digest_of(str(source))


def test_copy_of_a_hole_is_a_hole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with open(source, "wb") as file:
        file.seek(512 * MiB + 3)
        file.write(b"data")
        file.truncate(1024 * MiB + 1)
    copied(source, target)
    assert target.stat().st_size == 1024 * MiB + 1
    assert target.stat().st_blocks * 512 < MiB
    with open(target, "rb") as file:
        file.seek(512 * MiB + 3)
        assert file.read(5) == b"data\0"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), length=st.integers(1, 5 * BLOCK + 3))
def test_digest_tells_any_flipped_bit(data: st.DataObject, length: int) -> None:
    whole = bytearray(hashlib.shake_128(b"seed").digest(length))
    whole[: length // 2] = bytes(length // 2)
    before = streamed(bytes(whole))
    place = data.draw(st.integers(0, length - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    assert streamed(bytes(whole)) != before


@settings(max_examples=100, deadline=None)
@given(
    blocks=st.lists(st.sampled_from("ab0"), min_size=2, max_size=6),
    data=st.data(),
)
def test_digest_tells_a_block_that_moved(
    blocks: list[str], data: st.DataObject
) -> None:
    kinds = {"a": b"a" * BLOCK, "b": b"b" * BLOCK, "0": bytes(BLOCK)}
    moved = data.draw(st.permutations(blocks))
    one, other = (b"".join(kinds[each] for each in row) for row in (blocks, moved))
    assert (streamed(one) == streamed(other)) == (one == other)


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, MiB + 1])
def test_digest_tells_the_length_of_nothing_but_zeros(
    tmp_path: Path, length: int
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path, size in ((one, length), (other, length + 1)):
        path.touch()
        os.truncate(path, size)
    assert digest_of(str(one)) == streamed(bytes(length))
    assert digest_of(str(one)) != digest_of(str(other))


@pytest.mark.parametrize("algorithm", ["sha256", "sha384", "sha512"])
def test_other_digests_are_those_of_every_byte(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "file"
    data = written(path, [(5 * MiB, "d"), (BLOCK, "h"), (3, "d")])
    wanted = hashlib.new(algorithm, data).hexdigest()
    seen: list[int] = []
    assert digest_of(str(path), algorithm, seen.append) == f"{algorithm}:{wanted}"
    assert seen == sorted(seen) and seen[-1] == len(data)


def test_progress_of_a_digest_grows_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = written(path, [(3 * MiB, "h"), (5 * MiB + 5, "d")])
    seen: list[int] = []
    digest_of(str(path), seen=seen.append)
    assert seen == sorted(seen) and seen[-1] == len(data)


@settings(max_examples=50, deadline=None)
@given(layout=pieces)
def test_ranges_cover_all_that_is_not_zero_in_order(
    layout: list[tuple[int, str]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        data = bytearray(written(path, layout))
        last = 0
        with open(path, "rb") as file:
            for start, stop in data_ranges(file.fileno()):
                assert last <= start < stop <= len(data)
                data[start:stop] = bytes(stop - start)
                last = stop
        assert not any(data)


def test_copy_goes_by_hand_where_the_kernel_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems that answer so are not to be had on demand."""
    source = tmp_path / "source"
    data = written(source, [(BLOCK, "d"), (MiB, "h"), (5 * MiB + 1, "d")])
    answers = [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM]

    for number in [*answers, 0]:

        def refuse(*_args: object, number: int = number) -> int:
            if number:
                raise OSError(number, os.strerror(number))
            return 0

        monkeypatch.setattr(os, "copy_file_range", refuse)
        monkeypatch.setattr(fcntl, "ioctl", _no_reflink)
        target = tmp_path / f"target-{number}"
        assert copied(source, target) is False
        assert target.read_bytes() == data


def _no_reflink(*_args: object) -> int:
    raise OSError(errno.EOPNOTSUPP, "no")


def test_file_that_shrinks_while_it_is_copied_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * MiB)

    def ranges(fd: int) -> list[tuple[int, int]]:
        os.truncate(source, 10)
        return [(0, MiB)]

    monkeypatch.setattr(local_files, "data_ranges", ranges)
    monkeypatch.setattr(fcntl, "ioctl", _no_reflink)
    with pytest.raises(exc.IntegrityError, match="shorter"):
        copied(source, tmp_path / "target")


def test_other_failures_of_a_copy_are_not_hidden(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * BLOCK)
    with open("/dev/full", "wb") as full, pytest.raises(OSError):
        copy_sparse(str(source), full.fileno())


def test_files_and_folders_can_be_made_durable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fsync_path(str(tmp_path / "file"))
    fsync_path(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        fsync_path(str(tmp_path / "none"))


def test_a_paths_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\n"
        "tmpfs /srv tmpfs rw 0 0\n"
        "nas:/x /srv/shared\\040disks nfs4 rw 0 0\n"
        "/dev/b /srv/later xfs rw 0 0\n"
        "nas:/y /srv/later cifs rw 0 0\n"
    )
    for path, wanted in (
        ("/var/lib/x", "ext4"),
        ("/srv", "tmpfs"),
        ("/srvother", "ext4"),
        ("/srv/shared disks/store", "nfs4"),
        ("/srv/later/a/b", "cifs"),
    ):
        assert local_files.file_system(path, str(mounts)) == wanted
    assert local_files.file_system("/", str(tmp_path / "none")) == ""
    assert local_files.file_system("/proc/self") == "proc"
