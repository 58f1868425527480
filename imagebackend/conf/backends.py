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

CINDER = [
    cfg.StrOpt(
        "owner",
        default="service",
        choices=[
            (
                "service",
                "the service user's project: tenants see no volume, can do nothing to "
                "it, and it does not count in their quota",
            ),
            (
                "tenant",
                "the instance's project: visible, counted, and not protected from its "
                "users; needs the caller's credentials wherever one is made",
            ),
        ],
        help="Whose the volumes are.",
    ),
    cfg.StrOpt(
        "default_type",
        help="Volume type of disks for which neither flavor nor image names one. "
        "Unset: Cinder's own default.",
    ),
    cfg.StrOpt(
        "availability_zone",
        help="Zone of volumes: ``instance`` is the instance's own, anything else a "
        "name. Unset: Cinder's default.",
    ),
    cfg.DictOpt(
        "scheduler_hints",
        default={},
        help="Hints for Cinder's scheduler, as ``local_to_instance:{instance}``; "
        "``{instance}`` and ``{project}`` stand for the disk's.",
    ),
    cfg.DictOpt(
        "grow_attached",
        default={},
        help="Whether volumes of a type, by its name, can grow while they are "
        "attached: ``gold:true,files:false``. For others their pools decide, and their "
        "protocol: files cannot.",
    ),
    cfg.IntOpt(
        "create_timeout",
        default=300,
        min=1,
        help="Seconds to wait for a new volume.",
    ),
    cfg.IntOpt(
        "create_timeout_per_gb",
        default=20,
        min=0,
        help="Seconds more for each GiB of a volume that Cinder fills from an image.",
    ),
    cfg.IntOpt(
        "create_retries",
        default=1,
        min=0,
        help="How often a volume that ended in an error is made once more.",
    ),
    cfg.StrOpt(
        "rebuild",
        default="never",
        choices=[
            ("never", "a new volume, and the old one is deleted: with a way back"),
            ("when-full", "as never, but in place where quota or room is short"),
            ("always", "in place: volumes keep their ids; no way back once begun"),
        ],
        help="When a rebuild fills the present volume anew, instead of making another "
        "one.",
    ),
    cfg.IntOpt(
        "operation_timeout",
        default=120,
        min=1,
        help="Seconds to wait until a volume has grown, has gone or a snapshot is "
        "there.",
    ),
    cfg.FloatOpt(
        "poll_first",
        default=0.1,
        min=0.01,
        help="Seconds until the first look at a volume that is being worked on.",
    ),
    cfg.FloatOpt(
        "poll_longest",
        default=2.0,
        min=0.01,
        help="Seconds that the pause between two looks grows to.",
    ),
    cfg.StrOpt(
        "my_ip",
        help="This host's address, told to storages that want to know it. Unset: not "
        "told.",
    ),
    cfg.BoolOpt(
        "multipath",
        default=False,
        help="Reach block devices over all paths that there are.",
    ),
    cfg.StrOpt(
        "mount_path",
        help="Folder under which shares of file-based types are mounted. Unset: "
        "``mnt`` under ``[imagebackend] state_path``.",
    ),
    cfg.StrOpt(
        "lock_path",
        help="Folder of os-brick's locks: the same for all processes of this host that "
        "attach volumes, Nova's too. Unset: ``[oslo_concurrency] lock_path`` of this "
        "process. Needed for types whose volumes are devices or files of this host.",
    ),
    cfg.StrOpt(
        "ceph_conf",
        default="/etc/ceph/ceph.conf",
        help="For volumes in Ceph: configuration of their cluster, and the keyring of "
        "the user that Cinder names.",
    ),
]

SAMPLES = (
    ("cinder", "Volumes of any type of a Cinder.", [DRIVER, *CINDER]),
    ("rbd", "Images in Ceph: clones of Glance's, shareable.", [DRIVER, *RBD]),
    ("qcow2", "Local qcow2 files: overlays on the image cache.", [DRIVER, *FILES]),
    ("raw", "Local raw files: whole copies, shareable.", [DRIVER, *FILES]),
)
