# SPDX-License-Identifier: Apache-2.0
"""The safety checks: nothing untrusted reaches qemu-img before it passed here.

``oslo_utils``' format inspectors look at the bytes while they stream by: the format
found must be the one declared, and the image may name no other file (backing file,
data file, extents). What they leave out is checked here: a VMDK's parent, and what
QEMU would believe of a header against what an honest image can have, so that no
header makes a child process reserve memory without end, and no torn image reads as
zeros.
"""

from __future__ import annotations

import array
import os
import re
import struct
import sys
from dataclasses import dataclass
from typing import Any, BinaryIO

from imagebackend import exceptions as exc
from imagebackend.images.base import Readable
from imagebackend.model import ImageInfo, KiB, MiB

#: Partition tables and file systems that are met in raw images. They are content,
#: not a format that QEMU would follow.
_RAW = frozenset({"raw", "gpt", "iso", "luks"})
_ACCEPTED = {"raw": _RAW, "iso": frozenset({"iso", "gpt"})}
#: QEMU's driver for a declared format, where it has another name.
DRIVERS = {"vhd": "vpc", "iso": "raw"}

_SECTOR = 512
_HEAD = 320 * KiB  # as far as VHDX's tables of regions
_TAIL = 3 * _SECTOR  # the footer of a stream-optimized VMDK

_QCOW2_HEAD = struct.Struct(">4sIQIIQIIQQIIQ")
_QCOW2_MAX_L1 = 32 * MiB // 8  # as QEMU's QCOW_MAX_L1_SIZE
_QCOW2_MAX_REFTABLE = 8 * MiB  # as QEMU's QCOW_MAX_REFTABLE_SIZE
_QCOW2_MAX_SNAPSHOTS = 65536

# Capacity, sectors a grain, descriptor's place and length, entries a grain table,
# redundant and first grain directory; sectors all.
_VMDK_HEAD = struct.Struct("<4s8xQQQQIQQ")
_VMDK_AT_END = (1 << 64) - 1
_VMDK_MAX_ENTRIES = 512
_VMDK_COMPRESSED = 1 << 16
_VMDK_GRAIN = struct.Struct("<8xI")
_VMDK_DESCRIPTOR = slice(_SECTOR, 21 * _SECTOR)  # what QEMU looks for a parent in
_VMDK_EXTENT = re.compile(rb"^[ \t]*(?:rw|rdonly|noaccess)\s", re.MULTILINE)
_VMDK_PARENT = re.compile(rb"parentcid\s*=\s*(?!ffffffff\b)")

# Original and current size, cylinders, heads, sectors, type.
_VHD_FOOT = struct.Struct(">40xQQHBBI")
_VHD_DYNAMIC, _VHD_DIFFERENCING = 3, 4
_VHD_TABLE = struct.Struct(">8s8xQ4xII")  # place, entries, bytes a block
_VHD_NO_BLOCK = 0xFFFFFFFF

_VDI_HEAD = struct.Struct("<340xII28xI4xII")  # map, data, block size, blocks, used
_VHDX_REGIONS = (192 * KiB, 256 * KiB)
_VHDX_REGION = struct.Struct("<16xQI4x")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What passed: QEMU's driver for it, and the bytes that a disk from it needs."""

    driver: str
    virtual_size: int


class Inspected:
    """A stream that is looked at while it is read to its end."""

    def __init__(self, stream: Readable, info: ImageInfo) -> None:
        # Costs 0.2 s, and only a fetch needs it.
        from oslo_utils.imageutils import format_inspector

        self._module = format_inspector
        self._stream = stream
        self._info = info
        self._inspectors = [
            kind()
            for name, kind in format_inspector.ALL_FORMATS.items()
            if name != "raw"
        ]
        self._eating = list(self._inspectors)
        self._head = b""
        self._tail = b""
        self._length = 0

    def read(self, size: int, /) -> bytes:
        """``size`` bytes, fewer only at the end: the inspectors believe that what
        they look for at a stream's beginning comes in one piece."""
        chunk = self._stream.read(size)
        while 0 < len(chunk) < size:
            more = self._stream.read(size - len(chunk))
            if not more:
                break
            chunk += more
        if chunk:
            self._look_at(chunk)
        return chunk

    def _look_at(self, chunk: bytes) -> None:
        for each in list(self._eating):
            try:
                each.eat_chunk(chunk)
            except Exception:
                # It tells of its format by what it has seen so far.
                self._eating.remove(each)
        if len(self._head) < _HEAD:
            self._head = (self._head + chunk[:_HEAD])[:_HEAD]
        self._tail = (self._tail + chunk[-_TAIL:])[-_TAIL:]
        self._length += len(chunk)

    def verdict(self) -> Verdict:
        """After the last byte.

        :raises ImageRejected: another format than declared, names other files, or a
            header that cannot be.
        """
        if not self._length:
            raise self._rejected("it is empty")
        found = {str(each): each for each in self._inspectors if self._matches(each)}
        names = set(found) or {"raw"}
        declared = self._info.disk_format
        accepted = _ACCEPTED.get(declared, frozenset({declared}))
        if not names <= accepted or (declared == "iso" and "iso" not in names):
            raise self._rejected(
                f"it is declared as {declared}, its bytes say "
                f"{' and '.join(sorted(names))}",
                found=sorted(names),
            )
        if declared in ("raw", "iso"):
            return Verdict("raw", self._length)
        self._safe(found[declared])
        try:
            most = getattr(self, f"_check_{declared}")() or 0
            size = max(int(found[declared].virtual_size), most)
        except (struct.error, LookupError, ValueError):
            raise self._rejected("its header cannot be understood") from None
        if size <= 0:
            raise self._rejected("its header says that it holds nothing")
        return Verdict(DRIVERS.get(declared, declared), size)

    @staticmethod
    def _matches(inspector: Any) -> bool:
        try:
            inspector.finish()
            return bool(inspector.format_match)
        except Exception:
            # VMDK's, of a text that goes on with bytes that are none.
            return False

    def _safe(self, inspector: Any) -> None:
        try:
            inspector.safety_check()
        except self._module.SafetyCheckFailed as error:
            reasons = "; ".join(str(each) for each in error.failures.values())
            raise self._rejected(reasons, checks=sorted(error.failures)) from None
        except self._module.ImageFormatError as error:
            raise self._rejected(str(error)) from None

    def _check_qcow2(self) -> None:
        (
            _magic,
            _version,
            _backing,
            _backing_length,
            cluster_bits,
            size,
            crypt,
            l1_size,
            l1_offset,
            reftable_offset,
            reftable_clusters,
            snapshots,
            snapshots_offset,
        ) = _QCOW2_HEAD.unpack_from(self._head)
        if not 9 <= cluster_bits <= 21:
            raise self._rejected(f"its clusters would have 2^{cluster_bits} bytes")
        cluster = 1 << cluster_bits
        if crypt:
            raise self._rejected("it is encrypted, and nothing says with which key")
        if l1_size > _QCOW2_MAX_L1:
            raise self._rejected(f"its L1 table would have {l1_size} entries")
        # Each entry of L1 leads to a cluster of 8-byte entries for a cluster each.
        if l1_size * (cluster // 8) * cluster < size:
            raise self._rejected(
                f"its virtual size of {size} bytes is beyond its L1 table"
            )
        reftable = reftable_clusters * cluster
        if reftable > _QCOW2_MAX_REFTABLE:
            raise self._rejected(f"its refcount table would have {reftable} bytes")
        if snapshots > _QCOW2_MAX_SNAPSHOTS:
            raise self._rejected(f"it would have {snapshots} snapshots")
        self._inside(
            l1_offset + 8 * l1_size,
            reftable_offset + reftable,
            snapshots_offset if snapshots else 0,
        )

    def _check_vmdk(self) -> None:
        """QEMU opens the parent that a descriptor names, by whatever protocol; and a
        footer counts for it, not the header."""
        if not self._head.startswith(b"KDMV"):
            raise self._rejected("it only describes data that is in other files")
        descriptor = self._head[_VMDK_DESCRIPTOR].lower()
        if b"parentfilenamehint" in descriptor or _VMDK_PARENT.search(descriptor):
            raise self._rejected("it is a delta disk, which names its parent")
        text, _, _ = descriptor.partition(b"\0")
        if len(_VMDK_EXTENT.findall(text)) != 1 or text.count(b"createtype") != 1:
            raise self._rejected("its data is not all in this one file")
        head = _VMDK_HEAD.unpack_from(self._head)
        _, capacity, grain, _, _, entries, _, directory = head
        if directory == _VMDK_AT_END:
            foot = _VMDK_HEAD.unpack_from(self._tail, _SECTOR)
            *_, directory = foot
            if foot[:-2] != head[:-2]:
                raise self._rejected("its header and its footer differ")
        if not capacity or not grain or not entries:
            raise self._rejected("its header says that it holds nothing")
        if entries > _VMDK_MAX_ENTRIES or grain > 2 * MiB // _SECTOR:
            raise self._rejected("its grains or their tables are too large")
        tables = -(-capacity // (grain * entries))
        self._inside(directory * _SECTOR + 4 * tables)

    def _check_vhd(self) -> int:
        """QEMU has no check of its own for these, and believes other fields of the
        size than the one that is usually looked at."""
        foot: tuple[int, ...] = _VHD_FOOT.unpack_from(self._head)
        original, current, cylinders, heads, sectors, kind = foot
        if kind == _VHD_DIFFERENCING:
            raise self._rejected("it is a differencing disk, which names its parent")
        if kind != _VHD_DYNAMIC:
            raise self._rejected(f"it is a VHD of type {kind}: it must be dynamic")
        tail = self._tail[-_SECTOR:]
        if not tail.startswith(b"conectix") or _VHD_FOOT.unpack_from(tail) != foot:
            raise self._rejected("it lacks its footer: it is truncated")
        place, entries, _ = _vhd_table(self._head)
        self._inside(place + 4 * entries)
        geometry = cylinders * heads * sectors * _SECTOR
        return max(original, current, geometry)

    def _check_vhdx(self) -> None:
        for table in _VHDX_REGIONS:
            signature, count = struct.unpack_from("<4s4xI", self._head, table)
            if signature != b"regi" or count > 2047:
                raise self._rejected("its table of regions is damaged")
            for number in range(count):
                place, length = _VHDX_REGION.unpack_from(
                    self._head, table + 16 + 32 * number
                )
                self._inside(place + length)

    def _check_vdi(self) -> None:
        table, data, block, blocks, used = _VDI_HEAD.unpack_from(self._head)
        self._inside(table + 4 * blocks, data + block * used)

    def _inside(self, *ends: int) -> None:
        if max(ends) > self._length:
            raise self._rejected(
                f"its tables or data lie behind its end at {self._length} bytes: it "
                f"is truncated"
            )

    def _rejected(self, reason: str, **values: object) -> exc.ImageRejected:
        return rejected(self._info, reason, **values)


def check_blocks(info: ImageInfo, path: str, driver: str) -> None:
    """Whether the file has all of the data that the tables of a VHD or VMDK lead to;
    of the other formats QEMU's own check tells.

    :raises ImageRejected: QEMU would read zeros instead.
    """
    ends = {"vpc": _vhd_end, "vmdk": _vmdk_end}
    if driver not in ends:
        return
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        end = ends[driver](file, length)
    if end > length:
        raise rejected(
            info, f"its blocks lie behind its end at {length} bytes: it is truncated"
        )


def _vhd_end(file: BinaryIO, _length: int) -> int:
    place, entries, block = _vhd_table(file.read(_HEAD))
    table = _numbers(file, place, entries)
    table.byteswap()
    bitmap = -(-block // _SECTOR // 8 // _SECTOR) * _SECTOR
    last = max((each for each in table if each != _VHD_NO_BLOCK), default=0)
    return last * _SECTOR + bitmap + block if last else 0


def _vmdk_end(file: BinaryIO, length: int) -> int:
    head = file.read(_SECTOR)
    (flags,) = struct.unpack_from("<I", head, 8)
    numbers: tuple[int, ...] = _VMDK_HEAD.unpack_from(head)[1:]
    capacity, grain, _, _, entries, _, directory = numbers
    if directory == _VMDK_AT_END:
        file.seek(-2 * _SECTOR, os.SEEK_END)
        *_, directory = _VMDK_HEAD.unpack_from(file.read(_SECTOR))
    last = 0
    for place in _numbers(file, directory * _SECTOR, -(-capacity // (grain * entries))):
        if place:
            # 1 is a grain of zeros.
            last = max(last, *_numbers(file, place * _SECTOR, entries), 1)
    if last <= 1:
        return 0
    start = last * _SECTOR
    if not flags & _VMDK_COMPRESSED:
        return start + grain * _SECTOR
    file.seek(start)
    marker = file.read(_VMDK_GRAIN.size)
    if len(marker) < _VMDK_GRAIN.size:
        return length + 1
    size: int = _VMDK_GRAIN.unpack(marker)[0]
    return start + len(marker) + size


def _numbers(file: BinaryIO, place: int, count: int) -> array.array[int]:
    """A table of 32-bit numbers; only as much of it as there is."""
    file.seek(place)
    data = file.read(4 * count)
    table = array.array("I", data[: len(data) // 4 * 4])
    if sys.byteorder == "big":
        table.byteswap()
    return table


def _vhd_table(head: bytes) -> tuple[int, int, int]:
    """Place, entries and bytes a block of a dynamic VHD's table."""
    (header,) = struct.unpack_from(">Q", head, 16)
    table: tuple[bytes, int, int, int]
    table = _VHD_TABLE.unpack_from(head, min(header, len(head)))
    cookie, place, entries, block = table
    if cookie != b"cxsparse":
        raise ValueError(cookie)
    return place, entries, block


def rejected(info: ImageInfo, reason: str, **values: object) -> exc.ImageRejected:
    """The exception for an image that is not taken."""
    return exc.ImageRejected(
        f"image {info.id} is refused: {reason}",
        image=info.id,
        reason=reason,
        **values,
    )
