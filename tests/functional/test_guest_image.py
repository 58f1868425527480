# SPDX-License-Identifier: Apache-2.0
"""The test guest itself: what the other tests believe must be true."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebackend import exceptions as exc
from imagebackend.testing import guest_image
from imagebackend.testing.guest_image import GuestDisk, Report, parse_console
from imagebackend.testing.libvirt_guest import TestGuest

pytestmark = pytest.mark.timeout(300)

MiB = 1024**2


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that QEMU's own user may enter."""
    path = Path("/var/tmp") / f"imagebackend-guest-{uuid.uuid4()}"
    path.mkdir()
    path.chmod(0o711)
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    configured = os.environ.get("IMAGEBACKEND_GUEST_IMAGE")
    return guest_image.ensure(
        configured or str(tmp_path_factory.mktemp("guest") / "guest.qcow2")
    )


@pytest.fixture
def root(folder: Path, image: str) -> Path:
    """A pristine root disk."""
    path = folder / "root.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", image, path], check=True)
    return path


def disk_xml(
    path: Path, target: str = "vda", bus: str = "virtio", *, device: str = "disk"
) -> str:
    readonly = "<readonly/>" if device == "cdrom" else ""
    return (
        f'<disk type="file" device="{device}"><driver name="qemu" type="raw"/>'
        f'<source file="{path}"/><target dev="{target}" bus="{bus}"/>{readonly}'
        f"<serial>s-{target}</serial></disk>"
    )


def blank(path: Path, mib: int) -> Path:
    with path.open("xb") as file:
        file.truncate(mib * MiB)
    return path


@contextlib.contextmanager
def running(*disks: str) -> Iterator[TestGuest]:
    with TestGuest(f"test-{uuid.uuid4()}", disks) as guest:
        guest.start()
        guest.wait_ready()
        yield guest


# --- the image --------------------------------------------------------------


def test_an_image_that_is_up_to_date_is_not_made_again(image: str) -> None:
    before = os.stat(image)
    assert guest_image.ensure(image) == image
    after = os.stat(image)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_an_image_of_another_source_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "guest.raw"
    path.write_bytes(b"of an older source")
    (tmp_path / "guest.raw.stamp").write_text("older")
    guest_image.ensure(str(path))
    assert path.stat().st_size == guest_image.SIZE
    assert path.read_bytes()[510:512] == b"\x55\xaa"


def test_two_processes_at_once_make_one_image(tmp_path: Path) -> None:
    path = tmp_path / "guest.qcow2"
    argv = [sys.executable, "-m", "imagebackend.testing.guest_image", str(path)]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate()[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [len(text.splitlines()) for text in said] == [1, 1]
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"guest.qcow2", "guest.qcow2.stamp", "guest.qcow2.lock"}
    subprocess.run(["qemu-img", "check", "-q", path], check=True)


def test_a_missing_program_is_named_with_its_package_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_image, "_MBR", str(tmp_path / "absent"))
    with pytest.raises(exc.MissingDependency, match="syslinux-common"):
        guest_image.build(str(tmp_path / "guest.qcow2"))
    assert list(tmp_path.iterdir()) == []


# --- the console ------------------------------------------------------------


def test_the_console_is_understood_among_noise_and_the_last_word_counts() -> None:
    text = (
        "SeaBIOS\r\nIMAGEBACKEND-GUEST boot=1 uptime=1.2\r\n"
        "IMAGEBACKEND-DISK name=vda bytes=1024 serial=- ro=0 fs=-\r\n"
        "[    1.2] random: a line of the kernel\r\nIMAGEBACKEND-READY\r\n"
        "IMAGEBACKEND-GUEST boot=1 uptime=9.9\r\n"
        "IMAGEBACKEND-DISK name=vda bytes=2048 serial=abc ro=1 fs=vfat\r\n"
        "IMAGEBACKEND-OK disks\r\nIMAGEBACKEND-POWEROFF\r\n"
    )
    assert parse_console(text) == Report(
        boot=1,
        disks=(GuestDisk("vda", 2048, "abc", True, "vfat"),),
        ready=True,
        powered_off=True,
    )
    assert parse_console("noise only") == Report()


def test_a_line_that_is_still_being_said_is_not_a_report() -> None:
    whole = "IMAGEBACKEND-DISK name=vda bytes=1024 serial=abc ro=1 fs=iso9660\r\n"
    assert parse_console(whole[:-5]).disks == ()
    assert parse_console(whole).disks[0].fs == "iso9660"


# --- the guest --------------------------------------------------------------


def test_the_boot_counter_goes_on_with_the_disk(root: Path) -> None:
    for boot in (1, 2):
        began = time.monotonic()
        with running(disk_xml(root)) as guest:
            print(f"boot {boot} took {time.monotonic() - began:.2f} s")
            assert guest.report().boot == boot
            assert guest.report().ready
            guest.poweroff()
            assert guest.report().powered_off


def test_a_guest_tells_its_disks_on_every_bus_apart(folder: Path, root: Path) -> None:
    formatted = blank(folder / "formatted.raw", 16)
    subprocess.run(["mkfs.ext4", "-q", formatted], check=True)
    drive = folder / "drive.iso"
    content = folder / "content"
    content.mkdir()
    subprocess.run(["genisoimage", "-quiet", "-o", drive, content], check=True)
    with running(
        disk_xml(root),
        disk_xml(formatted, "vdb"),
        disk_xml(blank(folder / "ide.raw", 3), "hda", "ide"),
        disk_xml(drive, "hdb", "ide", device="cdrom"),
        disk_xml(blank(folder / "scsi.raw", 5), "sda", "scsi"),
    ) as guest:
        seen = {disk.name: disk for disk in guest.report().disks}
        serials = {disk.serial: disk for disk in guest.report().disks}
        guest.poweroff()
    assert (seen["vda"].bytes, seen["vda"].serial) == (guest_image.SIZE, "s-vda")
    assert (seen["vdb"].serial, seen["vdb"].fs) == ("s-vdb", "ext4")
    assert (serials["s-hda"].bytes, serials["s-hda"].fs) == (3 * MiB, None)
    assert serials["s-sda"].bytes == 5 * MiB
    assert seen["sr0"].fs == "iso9660"


def test_what_a_guest_writes_is_on_its_disk(folder: Path, root: Path) -> None:
    data = blank(folder / "data.raw", 8)
    with running(disk_xml(root), disk_xml(data, "vdb")) as guest:
        assert guest.command("write vdb 2 1 some text") == "write"
        word, digest = guest.command("sum vdb 2 1").split()
        assert guest.command("read vdb 2 1").split()[1] == digest
        guest.poweroff()
    content = data.read_bytes()
    expected = (b"some text\n" * MiB)[:MiB]
    assert word == "sum" and digest == hashlib.sha256(expected).hexdigest()
    assert content[2 * MiB : 3 * MiB] == expected
    assert not any(content[: 2 * MiB]) and not any(content[3 * MiB :])


def test_a_sum_is_of_the_disk_and_not_of_the_guests_cache(
    folder: Path, root: Path
) -> None:
    data = blank(folder / "data.raw", 4)
    with running(disk_xml(root), disk_xml(data, "vdb")) as guest:
        guest.command("sum vdb 0 4")
        with data.open("r+b") as file:
            file.write(b"written by another one" * 100)
        expected = hashlib.sha256(data.read_bytes()).hexdigest()
        assert guest.command("sum vdb 0 4") == f"sum {expected}"
        guest.poweroff()


@pytest.mark.parametrize(
    "text",
    [
        "sum vdz 0 1",
        "sum vdb 2 1",
        "sum vdb",
        "write vdz 0 1 text",
        "write vdb 2 1 text",
        "write vdb 0",
        "header vdz",
        "nonsense",
    ],
)
def test_a_command_that_cannot_be_done_is_answered_with_failed(
    guest_with_data: TestGuest, text: str
) -> None:
    with pytest.raises(exc.HypervisorError, match="IMAGEBACKEND-FAILED"):
        guest_with_data.command(text)
    assert guest_with_data.command("disks") == "disks"  # it goes on


@pytest.fixture(scope="module")
def guest_with_data(
    image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestGuest]:
    """A guest with 2 MiB at vdb, for tests that leave it as it was."""
    path = Path("/var/tmp") / f"imagebackend-guest-{uuid.uuid4()}"
    path.mkdir()
    path.chmod(0o711)
    root = path / "root.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", image, root], check=True)
    disks = (disk_xml(root), disk_xml(blank(path / "data.raw", 2), "vdb"))
    with running(*disks) as guest:
        yield guest
    subprocess.run(["rm", "-rf", path], check=True)


def test_an_evil_guest_has_written_a_header_that_names_a_file(
    folder: Path, root: Path
) -> None:
    data = blank(folder / "data.raw", 1)
    with running(disk_xml(root), disk_xml(data, "vdb")) as guest:
        assert guest.command("header vdb") == "header"
        guest.poweroff()
    header = data.read_bytes()[:4096]
    assert header[:4] == b"QFI\xfb" and b"/etc/passwd" in header


def test_a_guest_powers_off_when_asked_by_acpi(root: Path) -> None:
    import libvirt

    with (
        running(disk_xml(root)) as guest,
        contextlib.closing(libvirt.open("qemu:///system")) as connection,
    ):
        connection.lookupByUUIDString(guest.uuid).shutdown()
        deadline = time.monotonic() + 30
        while not guest.report().powered_off and time.monotonic() < deadline:
            time.sleep(0.05)
        assert guest.report().powered_off


# --- its end ----------------------------------------------------------------


def test_a_guest_is_gone_after_its_block_also_when_that_failed(root: Path) -> None:
    import libvirt

    with pytest.raises(ZeroDivisionError), running(disk_xml(root)) as guest:
        assert guest.uuid in guest.xml()
        raise ZeroDivisionError
    with contextlib.closing(libvirt.open("qemu:///system")) as connection:
        uuids = {domain.UUIDString() for domain in connection.listAllDomains()}
    assert guest.uuid not in uuids


def test_a_guest_that_is_off_takes_no_commands(folder: Path, root: Path) -> None:
    with running(disk_xml(root)) as guest:
        guest.poweroff()
        # Where the console was, the next file that is opened may be.
        others = [(folder / f"{number}").open("w+") for number in range(3)]
        with pytest.raises(exc.HypervisorError, match="is off"):
            guest.command("disks", timeout=2)
        assert [other.read() for other in others] == ["", "", ""]
        for other in others:
            other.close()


def test_a_killed_guest_is_waited_for_no_longer(root: Path) -> None:
    with running(disk_xml(root)) as guest:
        killer = threading.Timer(0.5, guest.kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(exc.HypervisorError, match="is off"):
            guest._wait_for("never said", 0, 60)
        killer.join()
    assert time.monotonic() - began < 20


def test_a_guest_has_the_memory_that_is_asked_for(root: Path) -> None:
    with TestGuest("test-memory", [disk_xml(root)], memory_mib=192) as guest:
        guest.start()
        assert str(192 * 1024) in guest.xml()


def test_a_libvirt_that_does_not_answer_is_said_to_be_so(root: Path) -> None:
    uri = "qemu+unix:///system?socket=/nowhere"
    with (
        TestGuest("test-nowhere", [disk_xml(root)], uri=uri) as guest,
        pytest.raises(exc.HypervisorError, match="/nowhere"),
    ):
        guest.start()


def test_a_missing_libvirt_binding_is_named_with_its_package(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "libvirt", None)
    with (
        TestGuest("test-missing", [disk_xml(root)]) as guest,
        pytest.raises(exc.MissingDependency, match="libvirt-python"),
    ):
        guest.start()
