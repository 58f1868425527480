# SPDX-License-Identifier: Apache-2.0
"""``[imagebackend_glance]``: the image source ``glance``.

How to reach Keystone and as whom are keystoneauth's own options, in the same group.
"""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

from imagebackend.conf.keystone import keystone_options

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


def list_opts() -> list[tuple[cfg.OptGroup, Sequence[cfg.Opt]]]:
    """For oslo-config-generator and the documentation: keystoneauth's part."""
    return [(GROUP, keystone_options()), (cfg.OptGroup("cinder"), keystone_options())]
