# SPDX-License-Identifier: Apache-2.0
"""Speed against the bare tools, both sides in one run."""
