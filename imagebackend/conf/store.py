# SPDX-License-Identifier: Apache-2.0
"""``[imagebackend_store]``: where the rows are."""

from oslo_config import cfg

GROUP = cfg.OptGroup(
    "imagebackend_store",
    title="The store",
    help="The rows that say which disks exist, where, and what is being done to them.",
)

OPTIONS = [
    cfg.StrOpt(
        "connection",
        secret=True,
        help="SQLAlchemy URL of the store. Unset: an SQLite file under "
        "``[imagebackend] state_path``, for this host alone. Hosts that share one "
        "name MariaDB or PostgreSQL here; evacuation needs that. An SQLite file "
        "must not lie on a network file system.",
    ),
    cfg.IntOpt(
        "busy_timeout",
        default=60,
        min=1,
        help="Seconds that a writer waits for another one.",
    ),
]
