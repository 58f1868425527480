# SPDX-License-Identifier: Apache-2.0
"""``[imagebackend_glance]``: the image source ``glance``.

How to reach Keystone and as whom are keystoneauth's own options, in the same group;
they need its library, so they are registered only where the source is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from oslo_config import cfg

GROUP = cfg.OptGroup(
    "imagebackend_glance",
    title="Glance",
    help="The image source ``glance``, with keystoneauth's options for the service "
    "user, who needs the role ``service``, and a role that may read every project's "
    "images.",
)

OPTIONS = [
    cfg.StrOpt(
        "copy_to_store",
        help="Store of Glance that this host's storage can clone from. An image that "
        "no storage of its disk can clone is copied there by Glance first, once "
        "(import method ``copy-image``). Unset: its bytes are copied for each disk.",
    ),
    cfg.IntOpt(
        "copy_timeout",
        default=600,
        min=1,
        help="Seconds to wait for such a copy.",
    ),
]

#: What a request may take, and how often one that never arrived is sent again, unless
#: the operator says otherwise; keystoneauth itself would wait for ever.
_DEFAULTS = {"timeout": 60, "connect_retries": 2}


def keystone_options() -> Sequence[cfg.Opt]:
    """:raises ImportError: keystoneauth1 is not installed."""
    from keystoneauth1 import loading

    adapter = [
        option
        for option in loading.get_adapter_conf_options()
        if option.dest
        in ("valid_interfaces", "region_name", "endpoint_override", "connect_retries")
    ]
    return [
        *loading.get_auth_common_conf_options(),
        *loading.get_session_conf_options(),
        *adapter,
    ]


def list_opts() -> list[tuple[cfg.OptGroup, Sequence[cfg.Opt]]]:
    """For oslo-config-generator and the documentation: keystoneauth's part."""
    return [(GROUP, keystone_options())]


def keystone_names(conf: cfg.ConfigOpts) -> set[str]:
    """Names of keystoneauth's options in a file, with those of the plugin that the
    file chooses; empty where its library is not installed."""
    try:
        from keystoneauth1 import exceptions, loading
    except ImportError:
        return set()
    options = list(keystone_options())
    register_keystone(conf)
    plugin = conf[GROUP.name].auth_type
    if plugin:
        with contextlib.suppress(exceptions.ClientException):
            options += loading.get_auth_plugin_conf_options(plugin)
    found = {option.name for option in options}
    # A file may have either spelling.
    return found | {name.replace("-", "_") for name in found}


def register_keystone(conf: cfg.ConfigOpts) -> None:
    """:raises ImportError: keystoneauth1 is not installed."""
    from keystoneauth1 import loading

    conf.register_opts(keystone_options(), group=GROUP.name)
    for name, value in _DEFAULTS.items():
        conf.set_default(name, value, GROUP.name)
    # Which of the plugin's options there are depends on auth_type.
    if conf[GROUP.name].auth_type:
        loading.load_auth_from_conf_options(conf, GROUP.name)
