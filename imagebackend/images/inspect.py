# SPDX-License-Identifier: Apache-2.0
"""The safety checks: nothing untrusted reaches qemu-img before it passed here.

``oslo_utils``' format inspector looks at the bytes while they stream by: the format
found must be the one declared, and the image may name no other file (backing file,
data file, extents). Beside that, what QEMU would believe of a qcow2 header is
checked against what an honest image can have, so that no header makes a child
process reserve memory without end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from imagebackend import exceptions as exc
from imagebackend.images.base import Readable
from imagebackend.model import ImageInfo, MiB

#: Partition tables and file systems that are met in raw images. They are content,
#: not a format that QEMU would follow.
_RAW = frozenset({"raw", "gpt", "iso", "luks"})
_ACCEPTED = {"raw": _RAW, "iso": frozenset({"iso", "gpt"})}
#: QEMU's driver for a declared format, where it has another name.
DRIVERS = {"vhd": "vpc", "iso": "raw"}
_QCOW2_HEAD = struct.Struct(">4sIQIIQIIQQIIQ")
_QCOW2_MAX_L1 = 32 * MiB // 8  # as QEMU's QCOW_MAX_L1_SIZE
_QCOW2_MAX_REFTABLE = 8 * MiB  # as QEMU's QCOW_MAX_REFTABLE_SIZE
_QCOW2_MAX_SNAPSHOTS = 65536
_VHD_DIFFERENCING = 4
_HEAD = 512


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
        self._info = info
        self._wrapper = format_inspector.InspectWrapper(stream)  # type: ignore[arg-type]
        self._head = b""
        self._length = 0

    def read(self, size: int, /) -> bytes:
        chunk = self._wrapper.read(size)
        if len(self._head) < _HEAD:
            self._head = (self._head + chunk[:_HEAD])[:_HEAD]
        self._length += len(chunk)
        return chunk

    def verdict(self) -> Verdict:
        """After the last byte.

        :raises ImageRejected: another format than declared, names other files, or a
            header that cannot be.
        """
        self._wrapper.close()
        inspectors = self._wrapper.formats or []
        found = {str(each) for each in inspectors}
        declared = self._info.disk_format
        accepted = _ACCEPTED.get(declared, frozenset({declared}))
        if (
            not found
            or not found <= accepted
            or (declared == "iso" and "iso" not in found)
        ):
            raise self._rejected(
                f"it is declared as {declared}, its bytes say "
                f"{' and '.join(sorted(found)) or 'nothing'}",
                found=sorted(found),
            )
        if declared in ("raw", "iso"):
            return Verdict("raw", self._length)
        (inspector,) = inspectors
        self._safe(inspector)
        if declared == "qcow2":
            self._check_qcow2()
        elif declared == "vhd":
            self._check_vhd()
        size = int(inspector.virtual_size)
        if size <= 0:
            raise self._rejected("its header says that it holds nothing")
        return Verdict(DRIVERS.get(declared, declared), size)

    def _safe(self, inspector: Any) -> None:
        try:
            inspector.safety_check()
        except self._module.SafetyCheckFailed as error:
            reasons = "; ".join(str(each) for each in error.failures.values())
            raise self._rejected(reasons, checks=sorted(error.failures)) from None
        except self._module.ImageFormatError as error:
            raise self._rejected(str(error)) from None

    def _check_qcow2(self) -> None:
        if len(self._head) < _QCOW2_HEAD.size:
            raise self._rejected("it ends within its header")
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
            _snapshots_offset,
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
        if reftable_clusters * cluster > _QCOW2_MAX_REFTABLE:
            raise self._rejected(
                f"its refcount table would have {reftable_clusters * cluster} bytes"
            )
        if snapshots > _QCOW2_MAX_SNAPSHOTS:
            raise self._rejected(f"it would have {snapshots} snapshots")
        if max(l1_offset + 8 * l1_size, reftable_offset) > self._length:
            raise self._rejected(
                f"its tables lie behind its end at {self._length} bytes: it is "
                f"truncated"
            )

    def _check_vhd(self) -> None:
        (kind,) = struct.unpack_from(">I", self._head, 60)
        if kind == _VHD_DIFFERENCING:
            raise self._rejected("it is a differencing disk, which names its parent")

    def _rejected(self, reason: str, **values: object) -> exc.ImageRejected:
        return exc.ImageRejected(
            f"image {self._info.id} is refused: {reason}",
            image=self._info.id,
            reason=reason,
            **values,
        )
