# SPDX-License-Identifier: Apache-2.0
"""``[imagebackend]``: what this host does with disks."""

from oslo_config import cfg

GROUP = cfg.OptGroup(
    "imagebackend",
    title="Disks of instances",
    help="Which storages this host uses, and for which disks.",
)

OPTIONS = [
    cfg.StrOpt(
        "state_path",
        default="/var/lib/imagebackend",
        help="Folder for what the library keeps on this host: its id, the store, "
        "locks, the image cache and, by default, local disks. It must survive a "
        "restart of the host.",
    ),
    cfg.ListOpt(
        "enabled_backends",
        default=["qcow2"],
        help="Names of the backends of this host. Each name is an option group "
        "with its own ``driver``; a group without one uses the driver of the same "
        "name. Disks of a backend that is taken off this list stay recorded, but "
        "cannot be worked on.",
    ),
    cfg.StrOpt(
        "default_backend",
        help="Backend of disks for which neither flavor nor image says anything. "
        "Unset: the first of ``enabled_backends``. A change is for new disks only.",
    ),
    cfg.StrOpt(
        "ephemeral_backend",
        help="Backend of ephemeral disks. Unset: as ``default_backend``.",
    ),
    cfg.StrOpt(
        "swap_backend",
        help="Backend of swap disks. Unset: as ``default_backend``.",
    ),
    cfg.BoolOpt(
        "allow_flavor_override",
        default=True,
        help="Whether a flavor's ``imagebackend:`` extra specs choose the backend. "
        "If false, a flavor that has one is refused on this host.",
    ),
    cfg.BoolOpt(
        "allow_image_volume_type",
        default=False,
        help="Whether an image's ``cinder_img_volume_type`` property chooses the "
        "root disk's volume type where the flavor says nothing.",
    ),
    cfg.IntOpt(
        "max_image_root_gb",
        default=0,
        min=0,
        max=8_589_934_591,  # bytes of it fit into the store
        help="With a flavor of ``root_gb = 0``, the root disk has the image's "
        "virtual size up to so many GiB. 0: such a flavor is refused, since anybody "
        "who may upload an image could fill the host.",
    ),
    cfg.IntOpt(
        "max_disk_gb",
        default=65536,
        min=1,
        max=8_589_934_591,
        help="No disk may be larger, in GiB, whoever asks.",
    ),
    cfg.StrOpt(
        "slow_path",
        default="copy",
        choices=[
            ("copy", "copy or convert the image's bytes"),
            ("refuse", "refuse to make the disk"),
        ],
        help="What to do when a storage cannot clone an image and its bytes would "
        "have to be copied.",
    ),
    cfg.StrOpt(
        "default_ephemeral_format",
        default="ext4",
        choices=["ext4", "xfs", "vfat"],
        help="File system of ephemeral disks that the flavor asks for, unless the "
        "image property ``os_type`` is ``windows``: then vfat.",
    ),
    cfg.StrOpt(
        "default_bus",
        default="virtio",
        choices=["virtio", "scsi", "sata", "ide", "usb"],
        help="Bus of disks whose image does not say.",
    ),
]
