# SPDX-License-Identifier: Apache-2.0
"""Where images come from, this host's cache of them, and the safety checks.

Sources are loaded with stevedore from ``imagebackend.image_sources``. Nothing here
knows of disks or rows: the cache is told by its caller which entries are in use.
"""
