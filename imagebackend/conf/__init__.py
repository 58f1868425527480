# SPDX-License-Identifier: Apache-2.0
"""Options, one module a group.

Groups carry the library's name, so that they live in a compute service's own
configuration file without a clash; a backend's group is named by the operator.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.conf import (
    backends,
    glance,
    host,
    images,
    libvirt,
    qemu_img,
    store,
)
from imagebackend.conf.keystone import keystone_names

_MODULES = (host, store, images, glance, qemu_img, libvirt)
#: Groups that no backend can have.
GROUPS = ("DEFAULT", *(module.GROUP.name for module in _MODULES))


def register(conf: cfg.ConfigOpts) -> None:
    """Register every option of the library; twice does no harm."""
    for module in _MODULES:
        # oslo.config keeps values in the group object: each configuration needs its
        # own, or two in one process would share them.
        group = module.GROUP
        conf.register_group(cfg.OptGroup(group.name, group.title, group.help))
        conf.register_opts(module.OPTIONS, group=module.GROUP)


def check_values(conf: cfg.ConfigOpts, group: str, options: Sequence[cfg.Opt]) -> None:
    """:raises ConfigError: a value in a file cannot be what its option is."""
    for option in options:
        try:
            conf[group][option.dest]
        except (cfg.Error, ValueError) as error:
            reason = str(error).rpartition("is not valid: ")[2]
            if option.secret:  # the reason may quote it
                reason = "a $ in it must be written as $$"
            raise exc.ConfigError(
                f"[{group}] {option.name} has a value that cannot be used: {reason}",
                group=group,
                option=option.name,
            ) from (None if option.secret else error)


def check(conf: cfg.ConfigOpts) -> None:
    """Look at every value of the library's own groups. :raises ConfigError:"""
    for module in _MODULES:
        check_values(conf, module.GROUP.name, module.OPTIONS)


def names(conf: cfg.ConfigOpts) -> dict[str, set[str]]:
    """The options of the library's own groups, as a file has them."""
    known: dict[str, set[str]] = {}
    for group, options in list_opts():
        if group.name in GROUPS:
            known.setdefault(group.name, set()).update(each.name for each in options)
    known[glance.GROUP.name] |= keystone_names(conf, glance.GROUP.name)
    return known


def sections(conf: cfg.ConfigOpts) -> Iterator[tuple[str, str, list[str]]]:
    """What the configuration files have: file, section, keys. oslo.config itself knows
    only what it was told to read."""
    files: list[str] = []
    # Whoever has not called the object yet has no files.
    with contextlib.suppress(cfg.Error):
        files += conf.config_file
        for folder in conf.config_dir:
            files += sorted(glob.glob(os.path.join(folder, "*.conf")))
    for path in files:
        found: dict[str, dict[str, list[str]]] = {}
        with contextlib.suppress(cfg.Error, OSError, ValueError):
            cfg.ConfigParser(path, found).parse()
        for section, values in found.items():
            yield path, section, list(values)


def list_opts() -> list[tuple[cfg.OptGroup, Sequence[cfg.Opt]]]:
    """For oslo-config-generator and the documentation."""
    return [(module.GROUP, module.OPTIONS) for module in _MODULES] + [
        (cfg.OptGroup(name, title=f"Backend of driver {name}", help=help_text), options)
        for name, help_text, options in backends.SAMPLES
    ]
