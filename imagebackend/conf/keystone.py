# SPDX-License-Identifier: Apache-2.0
"""How to reach a service of OpenStack, and as whom: keystoneauth's own options.

They are registered in the group of what uses the service, and only there: they need
keystoneauth's library, which the embedded defaults do without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from oslo_config import cfg

#: Of an endpoint's many options, those that a client here heeds.
_ADAPTER = ("valid_interfaces", "region_name", "endpoint_override", "connect_retries")
#: What a request may take, and how often one that never arrived is sent again, unless
#: the operator says otherwise; keystoneauth itself would wait for ever.
_DEFAULTS = {"timeout": 60, "connect_retries": 2}


def keystone_options() -> list[cfg.Opt]:
    """:raises ImportError: keystoneauth1 is not installed."""
    from keystoneauth1 import loading

    return [
        *loading.get_auth_common_conf_options(),
        *loading.get_session_conf_options(),
        *(
            option
            for option in loading.get_adapter_conf_options()
            if option.dest in _ADAPTER
        ),
    ]


def plugin_options(conf: cfg.ConfigOpts, group: str) -> Sequence[cfg.Opt]:
    """Those of the plugin that the group's ``auth_type`` chooses; none, where there is
    no such plugin."""
    from keystoneauth1 import exceptions, loading

    conf.register_opts(loading.get_auth_common_conf_options(), group=group)
    plugin = conf[group].auth_type
    if plugin:
        with contextlib.suppress(exceptions.ClientException):
            options: Sequence[cfg.Opt] = loading.get_auth_plugin_conf_options(plugin)
            return options
    return ()


def keystone_names(conf: cfg.ConfigOpts, group: str) -> set[str]:
    """Names of all these options, as a file may have them; empty where keystoneauth is
    not installed."""
    try:
        found = {each.name for each in keystone_options()}
        found |= {each.name for each in plugin_options(conf, group)}
    except ImportError:
        return set()
    # A file may have either spelling.
    return found | {name.replace("-", "_") for name in found}


def register_keystone(conf: cfg.ConfigOpts, group: str) -> None:
    """:raises ImportError: keystoneauth1 is not installed."""
    conf.register_opts(keystone_options(), group=group)
    for name, value in _DEFAULTS.items():
        conf.set_default(name, value, group)
    conf.register_opts(plugin_options(conf, group), group=group)
