# SPDX-License-Identifier: Apache-2.0
"""Images in a folder: what it gives out, and what it takes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagebackend import DiskManager
from imagebackend import exceptions as exc
from imagebackend.images.file import FileSource
from imagebackend.model import KiB, MiB, Progress, UploadTarget
from tests.conftest import HostUnderTest


@pytest.fixture
def source(host: HostUnderTest) -> FileSource:
    return FileSource(host.conf)


def read(source: FileSource, image_id: str) -> bytes:
    with source.open(source.get(image_id)) as stream:
        return b"".join(iter(lambda: stream.read(MiB), b""))


# --- ids ---------------------------------------------------------------------

BAD_IDS = [
    "",
    ".",
    "..",
    "../host-id",
    "a/b",
    "/etc/passwd",
    "a\\..\\b",
    "json:{}",
    "rbd:pool/x",
    "nbd://host",
    "file:x",
    "-rf",
    ".hidden",
    "_x",
    "a b",
    "a,b",
    "a=b",
    "a\n",
    "\na",
    "a\0b",
    "a\x1b[2J",
    "größe",
    "\uff11",
    "a" * 129,
    "%2e%2e",
]


@pytest.mark.field("A5")
@pytest.mark.parametrize("image_id", BAD_IDS)
def test_id_that_is_more_than_a_name_is_refused(
    source: FileSource, image_id: str
) -> None:
    with pytest.raises(exc.InvalidValue, match="image id is ") as caught:
        source.get(image_id)
    assert not any(ord(char) < 32 for char in caught.value.message)
    if not os.path.isabs(image_id):
        with pytest.raises(exc.InvalidValue):
            source.check_target(UploadTarget(image_id))


@pytest.mark.parametrize("image_id", [None, 1, True, b"image", ["image"]])
def test_id_that_is_no_text_is_refused(source: FileSource, image_id: object) -> None:
    with pytest.raises(exc.InvalidValue):
        source.get(image_id)  # type: ignore[arg-type]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(image_id=st.text())
def test_any_id_is_refused_or_not_found(source: FileSource, image_id: str) -> None:
    with pytest.raises((exc.InvalidValue, exc.ImageNotFound)):
        source.get(image_id)


def test_image_that_is_not_there_is_told_with_the_name_it_would_have(
    host: HostUnderTest, source: FileSource
) -> None:
    with pytest.raises(exc.ImageNotFound, match=r"none\.<format>"):
        source.get("none")
    host.set("folder", str(host.path / "no-such-folder"), "imagebackend_images")
    with pytest.raises(exc.ImageNotFound):
        source.get("none")
    with pytest.raises(exc.ConfigError, match="no-such-folder"):
        list(source.list())


def test_a_host_without_images_has_none(
    host: HostUnderTest, source: FileSource
) -> None:
    host.images.rmdir()
    assert list(source.list()) == []


def test_id_of_two_formats_is_refused(host: HostUnderTest, source: FileSource) -> None:
    host.raw_image("image")
    (host.images / "image.qcow2").write_bytes(b"x")
    with pytest.raises(exc.ImageRejected, match="as raw and as qcow2"):
        source.get("image")


# --- what it says of an image ------------------------------------------------


def test_format_is_that_of_the_name_and_never_of_the_bytes(
    host: HostUnderTest, source: FileSource
) -> None:
    host.qcow2_image("image")
    os.rename(host.images / "image.qcow2", host.images / "image.raw")
    info = source.get("image")
    assert info.disk_format == "raw"
    assert info.virtual_size == info.size == (host.images / "image.raw").stat().st_size


def test_metadata_beside_the_image_is_told(
    host: HostUnderTest, source: FileSource
) -> None:
    host.qcow2_image("image")
    digest = "sha512:" + "0" * 128
    properties = {"hw_disk_bus": "scsi", "os_require_quiesce": True, "n": 1}
    says = {
        "name": "Größe",
        "digest": digest,
        "virtual_size": 8 * MiB,
        "min_disk_gb": 2,
        "properties": properties,
    }
    (host.images / "image.json").write_text(json.dumps(says))
    info = source.get("image")
    assert (info.name, info.digest, info.version) == ("Größe", digest, digest)
    assert (info.virtual_size, info.min_disk_gb) == (8 * MiB, 2)
    assert info.properties == {
        "hw_disk_bus": "scsi",
        "os_require_quiesce": "True",
        "n": "1",
    }
    assert source.locations(info) == ()


_WRONG: dict[str, list[object]] = {
    "name": [1, None, [], {}, True],
    "digest": [1, None, [], False],
    "virtual_size": ["1", 1.5, None, True, [], -1],
    "min_disk_gb": ["1", 1.5, None, False, {}, -1],
    "properties": [[], "x", 1, None, True],
    "unheard-of": ["x", 1, None],
}


@pytest.mark.field("B10")
@pytest.mark.parametrize("key", _WRONG)
def test_metadata_of_the_wrong_type_is_refused_by_its_name(
    host: HostUnderTest, source: FileSource, key: str
) -> None:
    host.raw_image("image")
    for value in _WRONG[key]:
        (host.images / "image.json").write_text(json.dumps({key: value}))
        with pytest.raises(exc.ImageRejected, match=key):
            source.get("image")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"x"',
        b"1",
        b"[" * 100_000,
        b'{"name": "x"} more',
        b'{"virtual_size": ' + b"9" * 5000 + b"}",
        b'{"virtual_size": NaN}',
    ],
)
def test_metadata_that_is_no_json_object_is_refused(
    host: HostUnderTest, source: FileSource, text: bytes
) -> None:
    host.raw_image("image")
    (host.images / "image.json").write_bytes(text)
    with pytest.raises(exc.ImageRejected, match=r"image\.json"):
        source.get("image")


def test_metadata_that_is_a_folder_is_told(
    host: HostUnderTest, source: FileSource
) -> None:
    host.raw_image("image")
    (host.images / "image.json").mkdir()
    with pytest.raises(exc.StorageUnavailable, match="cannot read"):
        source.get("image")


def test_image_behind_a_symbolic_link_is_as_good(
    host: HostUnderTest, source: FileSource, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").write_bytes(b"bytes")
    (host.images / "image.raw").symlink_to(tmp_path / "elsewhere")
    assert read(source, "image") == b"bytes"
    assert [each.id for each in source.list()] == ["image"]


def test_list_skips_what_is_no_image(host: HostUnderTest, source: FileSource) -> None:
    host.raw_image("good.one")
    host.raw_image("twice")
    (host.images / "twice.iso").write_bytes(b"x")
    host.raw_image("bad-notes")
    (host.images / "bad-notes.json").write_text("{")
    (host.images / "folder.raw").mkdir()
    os.mkfifo(host.images / "fifo.raw")
    (host.images / "dangling.raw").symlink_to("nowhere")
    (host.images / "loop.raw").symlink_to("loop.raw")
    (host.images / f".{uuid.uuid4()}.raw").write_bytes(b"x")
    (host.images / "README").write_bytes(b"x")
    host.raw_image("unreadable-notes")
    (host.images / "unreadable-notes.json").mkdir()
    (host.images / "orphan.json").write_bytes(b"{}")
    (host.images / "bad name.raw").write_bytes(b"x")
    (host.images / os.fsdecode(b"\xff.raw")).write_bytes(b"x")
    assert [each.id for each in source.list()] == ["good.one"]
    host.set("folder", str(host.images / "README"), "imagebackend_images")
    with pytest.raises(exc.StorageUnavailable, match="README"):
        list(source.list())


# --- its bytes ---------------------------------------------------------------


@pytest.mark.field("A12")
def test_image_replaced_between_get_and_open_is_told(
    host: HostUnderTest, source: FileSource
) -> None:
    host.raw_image("image")
    info = source.get("image")
    os.unlink(host.images / "image.raw")
    with pytest.raises(exc.ImageNotFound, match="has left"), source.open(info):
        pass
    host.raw_image("image")
    with pytest.raises(exc.IntegrityError, match="was replaced"), source.open(info):
        pass


@pytest.mark.field("A12")
@pytest.mark.parametrize("digest", [False, True])
def test_image_overwritten_while_it_is_read_is_told(
    host: HostUnderTest, source: FileSource, digest: bool
) -> None:
    """Half of the one and half of the other is neither."""
    data = host.raw_image("image", 2 * MiB)
    if digest:
        host.describe("image", digest=f"sha256:{hashlib.sha256(data).hexdigest()}")
    info = source.get("image")
    path = host.images / "image.raw"

    def overwrite() -> None:
        with source.open(info) as stream:
            stream.read(MiB)
            with open(path, "r+b") as file:
                file.write(b"other")
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    if digest:
        overwrite()  # whoever reads compares the digest
    else:
        with pytest.raises(exc.IntegrityError, match="was replaced"):
            overwrite()


def test_reading_fails_in_our_words(
    host: HostUnderTest, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with bad sectors is not to be had on demand."""
    host.raw_image("image")
    info = source.get("image")
    with source.open(info) as stream:

        class Bad:
            def read(self, _size: int) -> bytes:
                raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(stream, "_file", Bad())
        with pytest.raises(exc.StorageUnavailable, match="Input/output"):
            stream.read(1)


# --- what it takes -----------------------------------------------------------


def upload(host: HostUnderTest, data: bytes = b"snapshot" * 10_000) -> Path:
    path = host.path / f"upload-{uuid.uuid4()}"
    path.write_bytes(data)
    return path


def test_image_that_was_put_is_there_with_its_digest(
    host: HostUnderTest, source: FileSource
) -> None:
    path = upload(host)
    seen: list[Progress] = []
    into = UploadTarget("image", "raw", properties={"os_type": "linux"})
    info = source.put(into, str(path), "token", progress=seen.append)
    assert source.get("image").digest == info.digest
    assert info.digest == f"sha512:{hashlib.sha512(path.read_bytes()).hexdigest()}"
    assert source.get("image").properties == {"os_type": "linux"}
    assert read(source, "image") == path.read_bytes()
    assert sorted(os.listdir(host.images)) == ["image.json", "image.raw"]
    assert seen[-1].done == seen[-1].total


@pytest.mark.parametrize("taken", ["image.raw", "image.qcow2", "image.iso"])
def test_image_that_is_there_is_never_replaced(
    host: HostUnderTest, source: FileSource, taken: str
) -> None:
    (host.images / taken).write_bytes(b"kept")
    into = UploadTarget("image", "raw")
    for call in (
        lambda: source.check_target(into),
        lambda: source.put(into, str(upload(host)), "token"),
    ):
        with pytest.raises(exc.Conflict, match="exists already"):
            call()
    assert os.listdir(host.images) == [taken]
    assert (host.images / taken).read_bytes() == b"kept"


def test_of_many_that_put_one_id_one_wins_whole(
    host: HostUnderTest, source: FileSource
) -> None:
    won: list[bytes] = []
    lost: list[exc.Conflict] = []
    ready = threading.Barrier(8)

    def put(number: int) -> None:
        data = bytes([number]) * 100_000
        path = upload(host, data)
        ready.wait()
        try:
            source.put(UploadTarget("image", "raw"), str(path), f"token-{number}")
        except exc.Conflict as error:
            lost.append(error)
        else:
            won.append(data)

    threads = [threading.Thread(target=put, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert read(source, "image") == won[0]
    digest = source.get("image").digest
    assert digest == f"sha512:{hashlib.sha512(won[0]).hexdigest()}"
    assert sorted(os.listdir(host.images)) == ["image.json", "image.raw"]


@contextlib.contextmanager
def small_file_system(folder: Path, size: str = "2m") -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("needs root: mounts")
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_image_is_put_across_file_systems_sparse(
    host: HostUnderTest, source: FileSource
) -> None:
    path = upload(host, b"")
    os.truncate(path, 64 * MiB)
    with open(path, "r+b") as file:
        file.seek(32 * MiB)
        file.write(b"data")
    with small_file_system(host.images):
        source.put(UploadTarget("image", "raw"), str(path), "token")
        facts = (host.images / "image.raw").stat()
        assert facts.st_size == 64 * MiB and facts.st_blocks * 512 < 64 * KiB
        assert read(source, "image") == path.read_bytes()


@pytest.mark.field("J5")
def test_put_onto_a_full_or_read_only_file_system_leaves_nothing(
    host: HostUnderTest, source: FileSource
) -> None:
    path = upload(host, os.urandom(4 * MiB))
    with small_file_system(host.images):
        into = UploadTarget("image", "raw")
        with pytest.raises(exc.NoSpace, match="full"):
            source.put(into, str(path), "token")
        assert os.listdir(host.images) == []
        subprocess.run(["mount", "-o", "remount,ro", host.images], check=True)
        with pytest.raises(exc.HostError):
            source.put(into, str(path), "token")
    assert path.stat().st_size == 4 * MiB, "what could not be taken is kept"


def test_absolute_path_gets_the_image_alone(
    host: HostUnderTest, source: FileSource, tmp_path: Path
) -> None:
    target = tmp_path / "größer, als=man: denkt.img"
    path = upload(host)
    info = source.put(UploadTarget(str(target), "raw"), str(path), "token")
    assert target.read_bytes() == path.read_bytes()
    assert info.size == target.stat().st_size
    assert target.name in os.listdir(tmp_path) and os.listdir(host.images) == []
    with pytest.raises(exc.Conflict):
        source.put(UploadTarget(str(target), "raw"), str(path), "token")


@pytest.mark.parametrize(
    "path",
    [
        "/no-such-folder/x",
        "{tmp}/file/x",
        "{tmp}/new\nline",
        "{tmp}/nul\0",
        "{tmp}/\ud800",
        "{tmp}/" + "x" * 256,
        "/" + "x/" * 3000 + "x",
        "{tmp}/folder/",
    ],
)
def test_absolute_path_that_cannot_be_is_refused_before_the_work(
    source: FileSource, tmp_path: Path, path: str
) -> None:
    (tmp_path / "file").touch()
    path = path.replace("{tmp}", str(tmp_path))
    with pytest.raises(exc.InvalidValue, match="path of the image"):
        source.check_target(UploadTarget(path, "raw"))


def test_target_that_is_a_dangling_link_is_taken(
    source: FileSource, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(exc.Conflict):
        source.check_target(UploadTarget(str(tmp_path / "link"), "raw"))


@pytest.mark.parametrize("disk_format", ["", "../x", "raw/../x", "RAW", "exe"])
def test_format_that_is_none_is_refused(source: FileSource, disk_format: str) -> None:
    with pytest.raises(exc.InvalidValue, match="format of the image"):
        source.check_target(UploadTarget("image", disk_format))


def test_target_of_a_source_that_there_is_not_is_refused(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    instance = host.instance()
    manager.create(instance)
    with pytest.raises(exc.ConfigError, match=r"snapshot is 'attic'"):
        manager.snapshot(instance.id, UploadTarget("image", source="attic"))


def test_dead_put_is_undone_and_a_whole_image_is_not(
    host: HostUnderTest, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    into, path = UploadTarget("image", "raw"), upload(host)

    class Killed(BaseException):
        pass

    def die(*_args: object) -> None:
        raise Killed

    real = os.link
    for number in range(1, 4):
        calls = 0

        def link(
            one: str,
            other: str,
            *,
            number: int = number,
        ) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            real(one, other)

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", link)
            patch.setattr(FileSource, "discard", die)
            with pytest.raises(Killed):
                source.put(into, str(path), "token")
        source.discard(into, "token")
        assert os.listdir(host.images) == [], number
    source.put(into, str(path), "token")
    source.discard(into, "token")
    source.discard(into, "token")
    assert read(source, "image") == path.read_bytes()
    assert json.loads((host.images / "image.json").read_text())["digest"]


@pytest.mark.field("C4")
def test_image_is_flushed_before_it_has_its_name(
    host: HostUnderTest, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, link = os.fsync, os.link

    def fsync(fd: int) -> None:
        order.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    def named(one: str, other: str) -> None:
        order.append("link " + os.path.basename(other))
        link(one, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", named)
    source.put(UploadTarget("image", "raw"), str(upload(host)), "token")
    part = order[0].removeprefix("link ")
    place = order.index("link image.raw")
    assert order.index(f"fsync {part}") < place
    assert order.index("link image.json") < place
    assert "fsync images" in order[place:]
