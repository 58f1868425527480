# SPDX-License-Identifier: Apache-2.0
"""The only way to qemu-img: paths stay paths, limits and errors have names."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.model import (
    BlockSource,
    FileSource,
    GiB,
    MiB,
    NetworkHost,
    NetworkSource,
    Progress,
)
from imagebackend.qemu_img import QemuImg, image_opts
from tests import image_files as files
from tests.conftest import HostUnderTest

GROUP = "imagebackend_qemu_img"


@pytest.fixture
def qemu_img(host: HostUnderTest) -> QemuImg:
    return QemuImg(host.conf)


def virtual_size(path: Path, format_: str) -> int:
    out = files.run("qemu-img", "info", "-U", "--output=json", "-f", format_, path)
    return int(json.loads(out)["virtual-size"])


# --- paths -----------------------------------------------------------------

PROTOCOLS = [
    'json:{"driver":"file","filename":"x"}',
    "json:{}",
    "rbd:pool/x",
    "nbd:localhost:1",
    "nbd://localhost",
    "file:x",
    "fat:rw:x",
    "driver=raw",
    "a,b",
    ",",
    ",,",
    "a,file.filename=x",
    "a=b,c=d",
    " blanks ",
    "-n",
    "%s%n",
    "quo\"te's",
    "back\\slash",
    "new\nline",
    "größer",
    "😀",
    os.fsdecode(b"not \xff unicode"),
]
#: One part of a path, as odd as a file system takes it.
names = (
    st.text(
        st.one_of(
            st.sampled_from(',=:"\\{}[]%#. '),
            st.characters(exclude_characters="/\0", exclude_categories=["Cs"]),
        ),
        min_size=1,
        max_size=40,
    )
    .filter(lambda name: name not in (".", ".."))
    .filter(lambda name: len(name.encode()) < 200)
)


def check_paths(qemu_img: QemuImg, folder: str, name: str) -> None:
    """Every verb takes the file of that name, in a folder of that name."""
    data = b"content" * 73 * 512
    inside = os.path.join(folder, name)
    os.makedirs(inside)
    name = os.path.basename(name)
    raw, qcow2 = os.path.join(inside, name), os.path.join(inside, f"{name}.q")
    Path(raw).write_bytes(data)
    qemu_img.convert_to_file(FileSource(raw, "raw"), qcow2, "qcow2")
    source = FileSource(qcow2, "qcow2")
    assert qemu_img.check(source) == ""
    overlay = os.path.join(inside, f"{name}.o")
    qemu_img.create_overlay(overlay, 4 * MiB, raw, "raw")
    qemu_img.resize(FileSource(overlay, "qcow2", FileSource(raw, "raw")), 8 * MiB)
    target = os.path.join(inside, f"{name}.t")
    qemu_img.create(target, 8 * MiB, "raw")
    qemu_img.convert(
        FileSource(overlay, "qcow2", FileSource(raw, "raw")),
        FileSource(target, "raw"),
        target_is_blank=True,
    )
    assert Path(target).read_bytes() == data.ljust(8 * MiB, b"\0")
    assert sorted(os.listdir(inside)) == sorted(
        name + end for end in ("", ".q", ".o", ".t")
    )
    assert len(os.listdir(folder)) == 1


@pytest.mark.field("A5")
@pytest.mark.parametrize("name", PROTOCOLS)
def test_path_is_never_read_as_a_protocol_or_an_option(
    qemu_img: QemuImg, tmp_path: Path, name: str
) -> None:
    (tmp_path / "in").mkdir()
    check_paths(qemu_img, str(tmp_path / "in"), name)


@pytest.mark.field("A5")
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=names)
def test_any_name_of_a_file_is_only_a_name(qemu_img: QemuImg, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_paths(qemu_img, folder, name)


@settings(max_examples=300)
@given(path=st.text(min_size=1), format_=st.sampled_from(["raw", "qcow2"]))
@example(path="a,,b", format_="raw")
def test_image_options_can_be_read_back(path: str, format_: str) -> None:
    """As QEMU reads them: a comma ends a value, two of them are one of its own."""
    text = image_opts(FileSource(path, format_, FileSource(path + ",", "raw")))
    options, value = [], ""
    rest = text
    while rest:
        before, comma, rest = rest.partition(",")
        value += before
        if comma and rest.startswith(","):
            value, rest = value + ",", rest[1:]
            if rest:
                continue
        options.append(value)
        value = ""
    assert dict(each.split("=", 1) for each in options) == {
        "driver": format_,
        "file.driver": "file",
        "file.filename": path,
        "backing.driver": "raw",
        "backing.file.driver": "file",
        "backing.file.filename": path + ",",
    }


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            BlockSource("/dev/x,y"),
            "driver=raw,file.driver=host_device,file.filename=/dev/x,,y",
        ),
        (
            NetworkSource("rbd", "pool/a,b", user="u", conf="/c"),
            "driver=raw,file.driver=rbd,file.pool=pool,file.image=a,,b,file.user=u,"
            "file.conf=/c",
        ),
        (
            NetworkSource("nbd", "e", hosts=[NetworkHost("::1", 10809)]),
            "driver=raw,file.driver=nbd,file.export=e,file.server.type=inet,"
            "file.server.host=::1,file.server.port=10809",
        ),
        (
            NetworkSource("nbd", "e", hosts=[NetworkHost("/run/s,k")]),
            "driver=raw,file.driver=nbd,file.export=e,file.server.type=unix,"
            "file.server.path=/run/s,,k",
        ),
    ],
)
def test_every_source_has_its_driver_named(
    source: BlockSource | NetworkSource, wanted: str
) -> None:
    assert image_opts(source) == wanted


def test_path_that_is_not_absolute_is_a_fault_of_ours(qemu_img: QemuImg) -> None:
    for path in ("x", "json:{}", "nbd://h", "", "./x"):
        with pytest.raises(exc.InternalError):
            qemu_img.create(path, MiB, "raw")
        with pytest.raises(exc.InternalError):
            qemu_img.create_overlay("/tmp/none/x", MiB, path, "raw")
        with pytest.raises(exc.InternalError):
            qemu_img.convert_to_file(FileSource("/dev/zero", "raw"), path, "raw")


@pytest.mark.field("A5")
def test_guest_that_wrote_a_header_changes_nothing(
    qemu_img: QemuImg, tmp_path: Path
) -> None:
    secret, disk, out = tmp_path / "secret", tmp_path / "disk", tmp_path / "out"
    secret.write_bytes(b"only the host's".ljust(MiB, b"!"))
    files.run(
        *("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", secret, disk)
    )
    bytes_ = disk.read_bytes()
    os.truncate(disk, 4 * MiB)
    qemu_img.convert_to_file(FileSource(str(disk), "raw"), str(out), "raw")
    assert out.read_bytes() == bytes_.ljust(4 * MiB, b"\0")
    qemu_img.resize(FileSource(str(disk), "raw"), 6 * MiB)
    assert disk.read_bytes() == bytes_.ljust(6 * MiB, b"\0")


# --- what the verbs promise --------------------------------------------------


def test_overlay_names_its_backing_file_and_format(
    qemu_img: QemuImg, tmp_path: Path
) -> None:
    base, overlay = tmp_path / "base", tmp_path / "overlay"
    base.write_bytes(bytes(MiB))
    qemu_img.create_overlay(str(overlay), GiB, str(base), "raw")
    out = files.run("qemu-img", "info", "--output=json", overlay)
    assert f'"backing-filename": "{base}"' in out
    assert '"backing-filename-format": "raw"' in out
    assert virtual_size(overlay, "qcow2") == GiB


@pytest.mark.parametrize("blank", [True, False])
def test_copy_writes_zeros_where_the_target_is_not_known_to_be_blank(
    qemu_img: QemuImg, tmp_path: Path, blank: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    data = b"a" * MiB + bytes(MiB) + b"b" * MiB
    source.write_bytes(data)
    target.write_bytes(bytes(4 * MiB) if blank else b"x" * 4 * MiB)
    qemu_img.convert(
        FileSource(str(source), "raw"),
        FileSource(str(target), "raw"),
        target_is_blank=blank,
    )
    assert target.read_bytes()[: 3 * MiB] == data


def test_compressed_copy_reads_the_same(qemu_img: QemuImg, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"again and again" * 100_000)
    qemu_img.convert_to_file(
        FileSource(str(source), "raw"), str(target), "qcow2", compress=True
    )
    assert target.stat().st_size < MiB
    files.run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", source, target)


def test_progress_grows_to_the_whole(qemu_img: QemuImg, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(64 * MiB))
    seen: list[Progress] = []
    qemu_img.convert_to_file(
        FileSource(str(source), "raw"), str(target), "qcow2", progress=seen.append
    )
    assert all(each.what == "convert" and each.total == 10000 for each in seen)
    done = [each.done for each in seen]
    assert done == sorted(done) and done[-1] == 10000 and len(set(done)) > 10
    assert files.run("qemu-img", "compare", source, target).startswith("Images are")


def test_progress_that_fails_stops_the_copy(qemu_img: QemuImg, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(8 * MiB))

    def stop(_progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qemu_img.convert_to_file(
            FileSource(str(source), "raw"), str(target), "qcow2", progress=stop
        )
    assert not children()


def children() -> list[str]:
    """Processes that this thread has started and that have not ended."""
    return Path("/proc/self/task", str(os.getpid()), "children").read_text().split()


def test_check_tells_leaks_from_damage(qemu_img: QemuImg, tmp_path: Path) -> None:
    path = tmp_path / "image"
    data = bytearray(files.make(tmp_path, "qcow2", files.content()).read_bytes())
    path.write_bytes(data)
    source = FileSource(str(path), "qcow2")
    assert qemu_img.check(source) == ""
    # One more cluster that is counted and not used: a leak.
    block = int.from_bytes(data[65536:65544], "big")
    used = len(data) // 65536
    leaky = data + bytes(65536)
    leaky[block + 2 * used : block + 2 * used + 2] = b"\0\1"
    path.write_bytes(leaky)
    assert qemu_img.check(source) == ""
    path.write_bytes(files.patched(bytes(data), block, bytes(8)))
    assert qemu_img.check(source) != ""


def test_format_without_a_check_passes_it(qemu_img: QemuImg, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"x" * 5000)
    assert qemu_img.check(FileSource(str(path), "raw")) == ""


# --- errors ------------------------------------------------------------------


@contextlib.contextmanager
def held_open(path: Path, format_: str) -> Iterator[None]:
    """As by a running guest."""
    daemon = subprocess.Popen(
        [
            *("qemu-storage-daemon", "--blockdev"),
            f"driver={format_},node-name=disk,file.driver=file,file.filename={path}",
            *("--nbd-server", f"addr.type=unix,addr.path={path}.sock"),
            *("--export", "type=nbd,id=e,node-name=disk,writable=on"),
            *("--pidfile", f"{path}.pid"),
        ]
    )
    try:
        while not Path(f"{path}.pid").exists():
            assert daemon.poll() is None
            time.sleep(0.01)
        yield
    finally:
        daemon.terminate()
        daemon.wait()


@pytest.mark.field("J5")
@pytest.mark.parametrize("format_", ["qcow2", "raw"])
def test_disk_that_a_guest_has_open_is_busy(
    qemu_img: QemuImg, tmp_path: Path, format_: str
) -> None:
    path = tmp_path / "disk"
    qemu_img.create(str(path), MiB, format_)
    source = FileSource(str(path), format_)
    calls: list[Callable[[], None]] = [
        lambda: qemu_img.resize(source, 2 * MiB),
        lambda: qemu_img.convert_to_file(source, str(tmp_path / "out"), "raw"),
    ]
    with held_open(path, format_):
        for call in calls:
            with pytest.raises(exc.Busy, match="running guest") as caught:
                call()
            assert caught.value.code == "busy"
    qemu_img.resize(source, 2 * MiB)
    assert virtual_size(path, format_) == 2 * MiB


@contextlib.contextmanager
def small_file_system(folder: Path, size: str = "8m") -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("needs root: mounts")
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.field("J5")
def test_full_and_read_only_file_systems_are_no_space(
    qemu_img: QemuImg, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(16 * MiB))
    with small_file_system(tmp_path / "small") as folder:
        for format_ in ("raw", "qcow2"):
            with pytest.raises(exc.NoSpace, match="No space left"):
                qemu_img.convert_to_file(
                    FileSource(str(source), "raw"), str(folder / "out"), format_
                )
            (folder / "out").unlink()
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(exc.NoSpace, match="Read-only"):
            qemu_img.create(str(folder / "new"), MiB, "qcow2")


@pytest.mark.field("J5")
def test_other_failures_carry_qemus_own_reason(
    qemu_img: QemuImg, tmp_path: Path
) -> None:
    source = FileSource(str(tmp_path / "none"), "qcow2")
    for call in (
        lambda: qemu_img.resize(source, MiB),
        lambda: qemu_img.check(source),
        lambda: qemu_img.convert_to_file(source, str(tmp_path / "out"), "raw"),
    ):
        with pytest.raises(exc.StorageError, match="No such file") as caught:
            call()
        assert type(caught.value) is exc.StorageError
        assert caught.value.values["returncode"] == 1
    with pytest.raises(exc.StorageError, match="hrink"):
        path = str(tmp_path / "disk")
        qemu_img.create(path, 2 * MiB, "raw")
        qemu_img.resize(FileSource(path, "raw"), MiB)


@pytest.mark.field("A7", "J5")
@pytest.mark.parametrize("name", ["memory", "allocate-memory", "lock", "out-of-memory"])
def test_name_of_an_image_is_not_taken_for_a_reason(
    qemu_img: QemuImg, tmp_path: Path, name: str
) -> None:
    with pytest.raises(exc.StorageError, match="No such file"):
        qemu_img.check(FileSource(str(tmp_path / name), "qcow2"))


# --- limits ------------------------------------------------------------------


@pytest.mark.field("A7")
@pytest.mark.parametrize("megabytes", [64, 100, 128, 160, 200, 224, 256, 300])
def test_limit_of_memory_is_named_when_it_is_hit(
    host: HostUnderTest, qemu_img: QemuImg, tmp_path: Path, megabytes: int
) -> None:
    """How much is too little depends on libc; what it is called does not."""
    host.set("memory_mb", megabytes, GROUP)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(4 * MiB))
    try:
        qemu_img.convert_to_file(
            FileSource(str(source), "raw"), str(tmp_path / "out"), "qcow2"
        )
    except exc.LimitExceeded as error:
        assert "[imagebackend_qemu_img] memory_mb" in error.message
        assert error.values["option"] == "memory_mb"


@pytest.mark.field("A7")
def test_table_that_takes_more_than_the_limit_names_it(
    host: HostUnderTest, qemu_img: QemuImg, tmp_path: Path
) -> None:
    host.set("memory_mb", 512, GROUP)
    path = files.make(tmp_path, "vhd", files.content())
    data = path.read_bytes()
    # A table of blocks for 2 TiB, as an honest image may have: 1 GiB of memory.
    path.write_bytes(files.patched(data, 512 + 28, (1 << 28).to_bytes(4, "big")))
    with pytest.raises(exc.LimitExceeded, match="memory_mb if the image is honest"):
        qemu_img.check(FileSource(str(path), "vpc"))


@pytest.mark.field("A7")
@pytest.mark.parametrize("option", ["cpu_seconds", "copy_cpu_seconds"])
def test_limit_of_cpu_time_is_named_when_it_is_hit(
    host: HostUnderTest,
    qemu_img: QemuImg,
    tmp_path: Path,
    fake_qemu_img: Path,
    option: str,
) -> None:
    """A qemu-img that is busy for a second is not to be had on demand."""
    host.set(option, 1, GROUP)
    fake_qemu_img.write_text("#!/bin/sh\nwhile :; do :; done\n")
    source = FileSource(str(tmp_path / "x"), "raw")
    with pytest.raises(exc.LimitExceeded, match=rf"\] {option} if") as caught:
        if option == "cpu_seconds":
            qemu_img.resize(source, MiB)
        else:
            qemu_img.convert_to_file(source, str(tmp_path / "out"), "raw")
    assert caught.value.values["option"] == option


@pytest.fixture
def fake_qemu_img(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "qemu-img"
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return path


@pytest.mark.field("A7")
@pytest.mark.parametrize(
    ("option", "progress"), [("timeout", False), ("copy_timeout", True)]
)
def test_run_that_takes_too_long_is_killed_and_names_its_limit(
    host: HostUnderTest,
    qemu_img: QemuImg,
    tmp_path: Path,
    fake_qemu_img: Path,
    option: str,
    progress: bool,
) -> None:
    host.set(option, 1, GROUP)
    fake_qemu_img.write_text("#!/bin/sh\nexec sleep 60\n")
    source = FileSource(str(tmp_path / "x"), "raw")
    started = time.monotonic()
    with pytest.raises(exc.LimitExceeded, match=rf"1 s: raise .*\] {option} if"):
        if option == "timeout":
            qemu_img.resize(source, MiB)
        else:
            qemu_img.convert_to_file(
                source,
                str(tmp_path / "out"),
                "raw",
                progress=(lambda _progress: None) if progress else None,
            )
    assert time.monotonic() - started < 5
    assert not children()


# --- what is not installed ---------------------------------------------------


@pytest.mark.field("J5")
def test_program_that_is_missing_is_named_with_its_package(
    qemu_img: QemuImg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(exc.MissingDependency) as caught:
        qemu_img.create(str(tmp_path / "x"), MiB, "raw")
    values = caught.value.values
    assert (values["program"], values["package"]) == ("qemu-img", "qemu-utils")


# --- child processes ---------------------------------------------------------


def test_child_keeps_the_lock_of_the_operation_that_it_works_for(
    tmp_path: Path,
) -> None:
    """An orphan counts as alive: the lock is on the description that it inherits."""
    path, pid = tmp_path / "lock", tmp_path / "pid"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def work() -> None:
        with processes.inheriting(fd):
            processes.run(
                ["sh", "-c", f"echo $$ > {pid}; exec sleep 60"],
                timeout=60,
                package="coreutils",
            )

    thread = threading.Thread(target=work)
    thread.start()
    while not (pid.exists() and pid.read_text().strip()):
        time.sleep(0.01)
    child = int(pid.read_text())
    os.close(fd)
    other = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(child, signal.SIGKILL)
    thread.join()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_child_of_no_operation_inherits_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        os.set_inheritable(file.fileno(), True)
        with processes.inheriting(file.fileno()):
            pass
        result = processes.run(
            ["sh", "-c", "ls /proc/self/fd | wc -l"], timeout=9, package="coreutils"
        )
    assert int(result.stdout) == 4  # its own three, and the folder that is listed


def test_child_writes_much_to_both_outputs_without_a_stall() -> None:
    script = "seq 100000; seq 100000 >&2; printf end; exit 3"
    seen: list[str] = []
    for follow in (None, seen.append):
        result = processes.run(
            ["sh", "-c", script], timeout=20, package="dash", on_output=follow
        )
        assert result.returncode == 3 and result.stderr.endswith("100000\n")
    assert "".join(seen).endswith("100000\nend")


def test_output_that_is_no_text_is_still_read() -> None:
    result = processes.run(["printf", "\\377x"], timeout=9, package="coreutils")
    assert result.stdout == "\ufffdx"
    assert processes.require("sh", "dash").endswith("/sh")
    with pytest.raises(exc.MissingDependency, match="no-such-program"):
        processes.require("no-such-program", "none")


@pytest.mark.parametrize("format_", ["raw", "qcow2"])
def test_zeroed_bytes_are_zeros_and_take_up_nothing(
    tmp_path: Path, qemu_img: QemuImg, format_: str
) -> None:
    path = str(tmp_path / "disk")
    qemu_img.create(path, 8 * MiB, format_)
    source = FileSource(path, format_)
    subprocess.run(
        ["qemu-io", "-f", format_, "-c", "write -P 90 0 8M", path],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    before = os.stat(path).st_blocks
    qemu_img.zero(source, 3 * MiB + 512, 5 * MiB - 512)
    told = subprocess.run(
        [
            *("qemu-io", "-r", "-f", format_, "-c", "read -P 90 0 3146240"),
            *("-c", "read -P 0 3146240 5242368", path),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "verification failed" not in told and told.count("read ") >= 2
    assert os.stat(path).st_blocks < before / 2
