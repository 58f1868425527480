# SPDX-License-Identifier: Apache-2.0
"""What guests see: disk XML, and work on a running guest's disks.

The library never starts a guest. Nothing here knows of backends or rows.
"""
