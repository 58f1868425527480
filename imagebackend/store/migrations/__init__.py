# SPDX-License-Identifier: Apache-2.0
"""Alembic revisions of the store. Additive within a release."""
