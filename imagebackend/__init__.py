# SPDX-License-Identifier: Apache-2.0
"""The disks that instances are born with: one interface, several storages.

The public names, nothing else. They are imported when first used, so that
``import imagebackend`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imagebackend.exceptions import ImageBackendError
    from imagebackend.manager import DiskManager
    from imagebackend.model import (
        Change,
        Disk,
        DiskSpec,
        Flavor,
        Instance,
        Lifecycle,
        Plan,
        Progress,
        Role,
        UploadTarget,
    )

__all__ = [
    "Change",
    "Disk",
    "DiskManager",
    "DiskSpec",
    "Flavor",
    "ImageBackendError",
    "Instance",
    "Lifecycle",
    "Plan",
    "Progress",
    "Role",
    "UploadTarget",
]

_HOME = {
    "DiskManager": "imagebackend.manager",
    "ImageBackendError": "imagebackend.exceptions",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_HOME.get(name, "imagebackend.model"))
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
