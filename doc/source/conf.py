# SPDX-License-Identifier: Apache-2.0
"""Documentation: made from the installed package, needs no network and no tag."""

import importlib.metadata

project = "imagebackend"
copyright = "OpenStack contributors"
release = importlib.metadata.version("imagebackend")
version = ".".join(release.split(".")[:2])

extensions = [
    "cliff.sphinxext",
    "openstackdocstheme",
    "oslo_config.sphinxconfiggen",
    "oslo_config.sphinxext",
    "sphinx.ext.autodoc",
]

html_theme = "openstackdocs"
# The theme would ask git for these; a shallow or renamed clone answers differently.
openstackdocs_repo_name = "openstack/imagebackend"
openstackdocs_auto_name = False
openstackdocs_auto_version = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

config_generator_config_file = [
    ("../../etc/oslo-config-generator/imagebackend.conf", "_static/imagebackend"),
]
autoprogram_cliff_application = "imagebackend"
