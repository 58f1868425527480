# SPDX-License-Identifier: Apache-2.0
"""Against the real thing: guests, killed processes, many processes, full disks."""
