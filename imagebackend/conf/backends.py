# SPDX-License-Identifier: Apache-2.0
"""Option groups of backends: each backend has one, named by the operator."""

from oslo_config import cfg

DRIVER = cfg.StrOpt(
    "driver",
    help="Entry point in ``imagebackend.backends``. Unset: the group's own name.",
)

_INSTANCES_PATH = cfg.StrOpt(
    "instances_path",
    help="Folder of the disks: ``<instance>/<disk>.<generation>.<deployment>``. "
    "Unset: ``instances`` under ``[imagebackend] state_path``. Local, or a file "
    "system that several hosts share.",
)

_PREALLOCATE = cfg.BoolOpt(
    "preallocate",
    default=False,
    help="Reserve a new disk's whole size at once, so that the host cannot run out "
    "of space under a running guest.",
)

FILES = [_INSTANCES_PATH, _PREALLOCATE]

RBD = [
    cfg.StrOpt(
        "ceph_conf",
        default="/etc/ceph/ceph.conf",
        help="Configuration file of the cluster: its monitors and the user's keyring. "
        "QEMU's tools on this host read it too.",
    ),
    cfg.StrOpt(
        "user",
        default="imagebackend",
        help="Ceph user, without ``client.``.",
    ),
    cfg.ListOpt(
        "pools",
        default=["vms"],
        help="Pools that disks may go to. The first one is the default; a flavor names "
        "another one by ``imagebackend:pool``.",
    ),
    cfg.StrOpt(
        "image_pool",
        help="Pool where Glance keeps its images, if the user may write there: raw "
        "snapshots go straight into it, without a way through this host's files. "
        "Unset: all snapshots are uploaded.",
    ),
    cfg.StrOpt(
        "secret_uuid",
        help="UUID of a libvirt secret that has the user's key already. Unset: one is "
        "derived from cluster and user, and defined when it is needed.",
    ),
    cfg.IntOpt(
        "connect_timeout",
        default=10,
        min=1,
        help="Seconds to wait for the monitors.",
    ),
    cfg.IntOpt(
        "operation_timeout",
        default=60,
        min=1,
        help="Seconds that a call to the cluster may take, or stay without progress, "
        "before it is given up. A dead client's lock runs out after some 30 s: less "
        "than that makes growing its disk fail.",
    ),
    cfg.IntOpt(
        "rollback_timeout",
        default=3600,
        min=1,
        help="Seconds that a revert may take: the cluster does not tell its progress.",
    ),
    cfg.IntOpt(
        "delete_timeout",
        default=60,
        min=0,
        help="Seconds to wait for the clients that still have a disk open before its "
        "deletion is refused. A client that died is let go after some 30 s.",
    ),
]

SAMPLES = (
    ("rbd", "Images in Ceph: clones of Glance's, shareable.", [DRIVER, *RBD]),
    ("qcow2", "Local qcow2 files: overlays on the image cache.", [DRIVER, *FILES]),
    ("raw", "Local raw files: whole copies, shareable.", [DRIVER, *FILES]),
)
