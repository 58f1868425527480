# SPDX-License-Identifier: Apache-2.0
"""The rows: disks, generations, attachments, owners, operations.

The rows are the journal: each outside effect is preceded and followed by a
committed one. Nothing here knows a backend or touches a disk.
"""
