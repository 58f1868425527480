# SPDX-License-Identifier: Apache-2.0
"""``[imagebackend_libvirt]``: how disks are declared to guests."""

from oslo_config import cfg

GROUP = cfg.OptGroup(
    "imagebackend_libvirt",
    title="libvirt",
    help="How disks are declared to guests, and which libvirt is asked.",
)

OPTIONS = [
    cfg.StrOpt(
        "uri",
        default="qemu:///system",
        help="The libvirt that runs this host's guests.",
    ),
    cfg.ListOpt(
        "cache_modes",
        default=["file=none", "block=none", "network=writeback"],
        help="Cache mode by kind of source: ``file``, ``block``, ``network`` equal "
        "to ``none``, ``writeback``, ``writethrough``, ``directsync`` or ``unsafe``. "
        "Shareable disks always get ``none``.",
    ),
    cfg.StrOpt(
        "discard",
        default="unmap",
        choices=["unmap", "ignore"],
        help="Whether a guest's discard (TRIM) frees space in the storage.",
    ),
    cfg.StrOpt(
        "detect_zeroes",
        default="off",
        choices=["off", "on", "unmap"],
        help="Whether QEMU looks for zeros in what a guest writes.",
    ),
    cfg.IntOpt(
        "iothread",
        default=0,
        min=0,
        help="Number of the domain's I/O thread that virtio disks use; the domain "
        "must declare it. 0: QEMU's main thread.",
    ),
    cfg.IntOpt(
        "operation_timeout",
        default=600,
        min=1,
        help="Seconds that work on a running guest (a backup job) may take without "
        "progress before it is aborted.",
    ),
]
