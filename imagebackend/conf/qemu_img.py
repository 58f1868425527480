# SPDX-License-Identifier: Apache-2.0
"""``[imagebackend_qemu_img]``: limits of the qemu-img child process."""

from oslo_config import cfg

GROUP = cfg.OptGroup(
    "imagebackend_qemu_img",
    title="qemu-img",
    help="Limits under which qemu-img works on images. A run that hits one fails "
    "with an error that names the option.",
)

OPTIONS = [
    cfg.IntOpt(
        "memory_mb",
        default=2048,
        min=64,
        help="Address space of one qemu-img, MiB. Storage libraries (Ceph) take "
        "several hundred MiB of it.",
    ),
    cfg.IntOpt(
        "cpu_seconds",
        default=30,
        min=1,
        help="CPU time of a qemu-img that makes or grows a disk.",
    ),
    cfg.IntOpt(
        "copy_cpu_seconds",
        default=3600,
        min=1,
        help="CPU time of a qemu-img that copies or converts data.",
    ),
    cfg.IntOpt(
        "timeout",
        default=120,
        min=1,
        help="Seconds after which a qemu-img that makes or grows a disk is given up.",
    ),
    cfg.IntOpt(
        "copy_timeout",
        default=21600,
        min=1,
        help="Seconds after which a qemu-img that copies or converts data is given up.",
    ),
]
