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

SAMPLES = (
    ("qcow2", "Local qcow2 files: overlays on the image cache.", [DRIVER, *FILES]),
    ("raw", "Local raw files: whole copies, shareable.", [DRIVER, *FILES]),
)
