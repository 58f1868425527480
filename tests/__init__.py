# SPDX-License-Identifier: Apache-2.0
"""Tests: ``unit`` needs no root and no service, ``functional`` the real things."""
