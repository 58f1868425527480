# SPDX-License-Identifier: Apache-2.0
"""Storages, one a file, behind the contract in :mod:`imagebackend.backends.base`.

A backend may use ``model``, ``exceptions``, ``conf``, ``qemu_img`` and ``processes``;
it never imports the manager, an action, the store or libvirt.
"""
