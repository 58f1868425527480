# SPDX-License-Identifier: Apache-2.0
"""``[imagebackend_images]``: where images come from, and this host's cache."""

from oslo_config import cfg

GROUP = cfg.OptGroup(
    "imagebackend_images",
    title="Images",
    help="Image sources and the cache of images on this host.",
)

OPTIONS = [
    cfg.StrOpt(
        "source",
        default="file",
        help="Image source, an entry point in ``imagebackend.image_sources``.",
    ),
    cfg.StrOpt(
        "folder",
        help="Folder of the ``file`` source: ``<id>.<format>`` beside an optional "
        "``<id>.json``. Unset: ``images`` under ``[imagebackend] state_path``.",
    ),
    cfg.StrOpt(
        "cache_path",
        help="Folder of the cache. Unset: ``cache`` under ``[imagebackend] "
        "state_path``. Hosts may share one folder; never let it be Nova's ``_base``.",
    ),
    cfg.StrOpt(
        "cache_format",
        default="raw",
        choices=[
            ("raw", "converted once; disks read from it at full speed"),
            ("as-is", "as the image came, if it is raw or qcow2: less space"),
        ],
        help="How the cache keeps an image.",
    ),
    cfg.IntOpt(
        "cache_max_mb",
        default=0,
        min=0,
        help="When pruned, unused images go, least recently used first, until the "
        "cache takes at most so many MiB. 0: no limit by size.",
    ),
    cfg.IntOpt(
        "cache_max_age",
        default=86400,
        min=0,
        help="When pruned, images that nobody used for so many seconds go.",
    ),
    cfg.BoolOpt(
        "require_digest",
        default=False,
        help="Refuse images whose source has no digest to check their bytes against.",
    ),
    cfg.IntOpt(
        "num_retries",
        default=3,
        min=0,
        help="How often a torn or corrupt download is tried again.",
    ),
    cfg.IntOpt(
        "max_image_gb",
        default=0,
        min=0,
        help="Refuse images of more than so many GiB of data. 0: no limit but the "
        "disk's size.",
    ),
]
