# SPDX-License-Identifier: Apache-2.0
"""The test bed: one module a part, each started and stopped by ``tools/testbed``.

Only the standard library and what comes with the parts: this runs before anything of
the project is installed.
"""
