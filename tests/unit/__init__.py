# SPDX-License-Identifier: Apache-2.0
"""Fast ones; real files and qemu-img, no guest, no service."""
