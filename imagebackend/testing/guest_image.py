# SPDX-License-Identifier: Apache-2.0
"""A small guest of our own, from Debian's kernel and busybox.

It boots from its own disk in seconds, also without hardware virtualization, and says
on its serial console what it sees::

    IMAGEBACKEND-GUEST boot=2 uptime=1.83
    IMAGEBACKEND-DISK name=vda bytes=1073741824 serial=0b1e… ro=0 fs=-
    IMAGEBACKEND-READY

The boot counter is on the root disk, between its first sector and its partition: a
pristine disk says 1. Then it takes commands, a line each, and answers with
``IMAGEBACKEND-OK …`` or ``IMAGEBACKEND-FAILED …``:

``disks``
    all of the above again.
``write DEVICE OFFSET COUNT TEXT``
    fills COUNT MiB at OFFSET MiB with the text, repeated.
``sum DEVICE OFFSET COUNT`` (or ``read``)
    answers with the SHA-256 of those MiB, as the disk has them and not the guest's
    cache. Like ``write``, it fails where the device has no such MiB.
``header DEVICE``
    writes a qcow2 header that names ``/etc/passwd`` onto the device: what an evil
    guest would try.
``poweroff``
    ``IMAGEBACKEND-POWEROFF``, and off. So it does when asked by ACPI.

Debian's cloud kernel has no AHCI: disks on virtio, virtio-scsi and IDE are seen, those
on SATA are not.

``python -m imagebackend.testing.guest_image FILE`` makes the image.
"""

from __future__ import annotations

import fcntl
import glob
import gzip
import hashlib
import lzma
import os
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.model import MiB

SIZE = 32 * MiB
_SECTOR = 512
_START = 2048  # of the partition, in sectors
_MARKER, _MARKER_SECTOR, _COUNTER_SECTOR = "IMAGEBACKEND-ROOT", 63, 64
_MODULES = (
    *("virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod", "sr_mod", "ata_piix"),
    *("button", "evdev"),  # ACPI's power button
)
_MBR = "/usr/lib/syslinux/mbr/mbr.bin"
_BUSYBOX = "/bin/busybox"
_TIMEOUT = 300
_SYSLINUX = """\
SERIAL 0 115200
DEFAULT linux
PROMPT 0
LABEL linux
 KERNEL /vmlinuz
 INITRD /initrd.gz
 APPEND console=ttyS0 panic=-1 quiet loglevel=0 tsc=unstable
"""
_INIT = f"""\
#!{_BUSYBOX} sh
{_BUSYBOX} mkdir -p /proc /sys /dev /usr/bin /sbin /usr/sbin
{_BUSYBOX} --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod $module 2>/dev/null; done
exec </dev/ttyS0 >/dev/ttyS0 2>/dev/null
stty -echo

names() {{ ls /sys/block | grep -E '^(vd|sd|hd|sr)'; }}

serial() {{
    if [ -e /sys/block/$1/serial ]; then cat /sys/block/$1/serial
    else dd if=/sys/block/$1/device/vpd_pg80 bs=1 skip=4; fi | tr -cd 'A-Za-z0-9._-'
}}

peek() {{ dd if=/dev/$1 bs=1 skip=$2 count=$3 | tr -d '\\0'; }}

filesystem() {{
    magic=$(peek $1 1080 2 | hexdump -ve '1/1 "%02x"')
    if [ "$magic" = 53ef ]; then echo ext4
    elif [ "$(peek $1 4086 10)" = SWAPSPACE2 ]; then echo swap
    elif [ "$(peek $1 32769 5)" = CD001 ]; then echo iso9660
    elif [ "$(peek $1 0 4)" = XFSB ]; then echo xfs
    elif [ "$(peek $1 54 3)" = FAT ] || [ "$(peek $1 82 3)" = FAT ]; then echo vfat
    fi
}}

disks() {{
    echo "IMAGEBACKEND-GUEST boot=$boot uptime=$(cut -d' ' -f1 /proc/uptime)"
    for name in $(names); do
        bytes=$(($(cat /sys/block/$name/size) * {_SECTOR}))
        serial=$(serial $name)
        fs=$(filesystem $name)
        ro=$(cat /sys/block/$name/ro)
        echo "IMAGEBACKEND-DISK name=$name bytes=$bytes serial=${{serial:--}}" \\
            "ro=$ro fs=${{fs:--}}"
    done
}}

within() {{
    [ -b "/dev/$1" ] && [ "$2" -ge 0 ] && [ "$3" -gt 0 ] &&
        [ $((($2 + $3) * 2048)) -le "$(cat /sys/class/block/$1/size)" ]
}}

off() {{
    sync
    echo IMAGEBACKEND-POWEROFF
    poweroff -f
}}

failed() {{ echo "IMAGEBACKEND-FAILED $*"; }}

# The controllers' disks come a moment after their modules.
for wait in 1 2 3 4 5 6 7 8 9 10; do
    [ -n "$(names)" ] && break
    sleep 0.1
done
sleep 0.2
boot=0
for name in $(names); do
    marker=$(dd if=/dev/$name bs={_SECTOR} skip={_MARKER_SECTOR} count=1 | tr -d '\\0')
    if [ "$marker" = {_MARKER} ]; then
        boot=$(dd if=/dev/$name bs={_SECTOR} skip={_COUNTER_SECTOR} count=1 |
            tr -cd 0-9)
        boot=$((${{boot:-0}} + 1))
        echo $boot | dd of=/dev/$name bs={_SECTOR} seek={_COUNTER_SECTOR} \\
            conv=sync,notrunc,fsync
        break
    fi
done
disks
# Open before it is ready: what is pressed earlier would be lost.
for input in /sys/class/input/event*; do
    if [ "$(cat $input/device/name)" = "Power Button" ]; then
        exec 3</dev/input/${{input##*/}}
        {{ dd bs=24 count=1 <&3 >/dev/null && off; }} &
    fi
done
echo IMAGEBACKEND-READY
while read verb device offset count text; do
    case $verb in
    write | sum | read)
        if ! within "$device" "$offset" "$count"; then
            failed "$verb: $device has no such MiB"
            continue
        fi ;;
    esac
    case $verb in
    write)
        yes "$text" | dd of=/dev/$device bs=1M seek=$offset count=$count \\
            iflag=fullblock conv=notrunc,fsync &&
            echo "IMAGEBACKEND-OK write" || failed "write: not to $device" ;;
    sum | read)
        echo 1 >/proc/sys/vm/drop_caches
        sum=$(set -o pipefail
            dd if=/dev/$device bs=1M skip=$offset count=$count | sha256sum) &&
            echo "IMAGEBACKEND-OK sum ${{sum%% *}}" || failed "sum: not of $device" ;;
    header)
        [ -b "/dev/$device" ] &&
            dd if=/header of=/dev/$device bs=4096 conv=notrunc,fsync &&
            echo "IMAGEBACKEND-OK header" || failed "header: not to $device" ;;
    disks) disks && echo "IMAGEBACKEND-OK disks" ;;
    poweroff) off ;;
    '') ;;
    *) failed "$verb is not a command" ;;
    esac
done
"""


@dataclass(frozen=True, slots=True)
class GuestDisk:
    """A disk as the guest sees it; None where it has no such thing."""

    name: str
    bytes: int
    serial: str | None
    readonly: bool
    fs: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """What the guest has said so far; of each thing, the last."""

    boot: int | None = None
    disks: tuple[GuestDisk, ...] = ()
    ready: bool = False
    powered_off: bool = False


def parse_console(text: str) -> Report:
    """What the guest says, among whatever else is on its console."""
    boot: int | None = None
    disks: dict[str, GuestDisk] = {}
    *lines, _ = text.replace("\r\n", "\n").split("\n")  # the last is not whole yet
    for line in lines:
        found = re.search(r"IMAGEBACKEND-GUEST boot=(\d+) uptime=", line)
        if found:
            boot, disks = int(found[1]), {}
        found = re.search(
            r"IMAGEBACKEND-DISK name=(\S+) bytes=(\d+) serial=(\S+) ro=([01]) fs=(\S+)",
            line,
        )
        if found:
            name, size, serial, readonly, fs = found.groups()
            disks[name] = GuestDisk(
                name,
                int(size),
                None if serial == "-" else serial,
                readonly == "1",
                None if fs == "-" else fs,
            )
    return Report(
        boot,
        tuple(disks.values()),
        "IMAGEBACKEND-READY" in text,
        "IMAGEBACKEND-POWEROFF" in text,
    )


def ensure(path: str) -> str:
    """Make the image unless one of this source and kernel is there; its path.

    :raises MissingDependency: with the Debian package that is missing.
    """
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = _inputs()
        if not (os.path.exists(path) and _read(f"{path}.stamp") == wanted):
            build(path)
            with open(f"{path}.stamp", "w") as stamp:
                stamp.write(wanted)
    return path


def build(path: str) -> None:
    """Make the image: qcow2, or raw if the name ends so. Whole or not at all."""
    version = _kernel()
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path) or ".") as folder:
        disk = os.path.join(folder, "disk.raw")
        initrd = os.path.join(folder, "initrd.gz")
        with gzip.GzipFile(initrd, "wb", mtime=0) as file:
            for piece in _cpio(_initramfs(version, folder)):
                file.write(piece)
        _make_disk(disk, folder, f"/boot/vmlinuz-{version}", initrd)
        result = disk
        if not path.endswith((".raw", ".img")):
            result = os.path.join(folder, "disk.qcow2")
            _run(
                "qemu-utils",
                "qemu-img",
                "convert",
                "-f",
                "raw",
                "-O",
                "qcow2",
                "-c",
                disk,
                result,
            )
        os.rename(result, path)


def _kernel() -> str:
    """The newest of Debian's cloud kernels: the smallest that has all drivers."""
    found = [
        path.removeprefix("/boot/vmlinuz-")
        for path in glob.glob("/boot/vmlinuz-*-cloud-amd64")
    ]
    if not found:
        raise processes.missing(
            "a kernel for the test guest", "linux-image-cloud-amd64"
        )
    return max(found, key=lambda text: [int(each) for each in re.findall(r"\d+", text)])


def _inputs() -> str:
    busybox = os.stat(_BUSYBOX) if os.path.exists(_BUSYBOX) else None
    with open(__file__, "rb") as source:
        hasher = hashlib.sha256(source.read())
    hasher.update(f"{_kernel()} {busybox and busybox.st_mtime_ns}".encode())
    return hasher.hexdigest()


def _initramfs(version: str, folder: str) -> dict[str, tuple[int, bytes]]:
    """Mode and content by name."""
    if not os.path.exists(_BUSYBOX):
        raise processes.missing("busybox", "busybox-static")
    with open(_BUSYBOX, "rb") as file:
        busybox = file.read()
    content = {
        "bin": (0o40755, b""),
        "bin/busybox": (0o100755, busybox),
        "dev": (0o40755, b""),
        "modules": (0o40755, b""),
        "init": (0o100755, _INIT.encode()),
        "header": (0o100644, _evil_header(folder)),
    }
    for number, path in enumerate(_modules(version)):
        with open(path, "rb") as file:
            data = file.read()
        if path.endswith(".xz"):
            data = lzma.decompress(data)
        name = os.path.basename(path).removesuffix(".xz")
        content[f"modules/{number:02}-{name}"] = (0o100644, data)
    return content


def _modules(version: str) -> list[str]:
    """Files of the modules, in the order in which they can be loaded."""
    found: dict[str, None] = {}
    for module in _MODULES:
        out = _run("kmod", "modprobe", "-S", version, "-D", module)
        for line in out.splitlines():
            verb, _, path = line.strip().partition(" ")
            if verb == "insmod":  # else it is built in
                found[path.split()[0]] = None
    return list(found)


def _evil_header(folder: str) -> bytes:
    path = os.path.join(folder, "evil.qcow2")
    _run(
        "qemu-utils",
        "qemu-img",
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "/etc/passwd",
        path,
        "8G",
    )
    with open(path, "rb") as file:
        return file.read(4096)


def _cpio(content: dict[str, tuple[int, bytes]]) -> Iterator[bytes]:
    """A cpio archive of the kernel's "newc" kind."""
    console = {"dev/console": (0o20600, b"")}
    entries = [*(content | console).items(), ("TRAILER!!!", (0, b""))]
    for inode, (name, (mode, data)) in enumerate(entries, 1):
        device = (5, 1) if name == "dev/console" else (0, 0)
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields)
        header += name.encode() + b"\0"
        yield header + bytes(-len(header) % 4)
        yield data + bytes(-len(data) % 4)


def _make_disk(disk: str, folder: str, kernel: str, initrd: str) -> None:
    if not os.path.exists(_MBR):
        raise processes.missing("syslinux's boot sector", "syslinux-common")
    sectors = SIZE // _SECTOR - _START
    with open(_MBR, "rb") as file:
        boot = file.read(440)
    entry = struct.pack(
        "<B3sB3sII", 0x80, b"\xfe\xff\xff", 0x0E, b"\xfe\xff\xff", _START, sectors
    )
    with open(disk, "xb") as file:
        file.write(boot.ljust(446, b"\0") + entry.ljust(64, b"\0") + b"\x55\xaa")
        file.seek(_MARKER_SECTOR * _SECTOR)
        file.write(_MARKER.encode())
        file.truncate(SIZE)
    _run(
        "dosfstools",
        "mkfs.vfat",
        "-F",
        "16",
        "--offset",
        str(_START),
        disk,
        str(sectors // 2),
    )
    config = os.path.join(folder, "syslinux.cfg")
    with open(config, "w") as text:
        text.write(_SYSLINUX)
    offset = _START * _SECTOR
    for path, name in (
        (kernel, "vmlinuz"),
        (initrd, "initrd.gz"),
        (config, "syslinux.cfg"),
    ):
        _run("mtools", "mcopy", "-i", f"{disk}@@{offset}", path, f"::/{name}")
    _run("syslinux", "syslinux", "--offset", str(offset), "--install", disk)


def _run(package: str, *argv: str) -> str:
    program = shutil.which(argv[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        raise processes.missing(argv[0], package)
    result = processes.run([program, *argv[1:]], timeout=_TIMEOUT, package=package)
    if result.returncode:
        reason = result.stderr.strip() or result.stdout.strip()
        raise exc.HostError(f"{' '.join(argv)} failed: {reason}", program=argv[0])
    return result.stdout


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m imagebackend.testing.guest_image FILE", file=sys.stderr)
        return 2
    try:
        path = ensure(argv[0])
    except exc.ImageBackendError as error:
        print(f"guest image: {error}", file=sys.stderr)
        return 1
    print(f"guest image: {path}, {os.path.getsize(path) // MiB} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
