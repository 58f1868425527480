# SPDX-License-Identifier: Apache-2.0
"""pbr reads setup.cfg and git; it is switched on here."""

import setuptools

setuptools.setup(pbr=True)
