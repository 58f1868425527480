# SPDX-License-Identifier: Apache-2.0
"""Release notes. Nothing here needs the package to be installed."""

project = "imagebackend Release Notes"
copyright = "OpenStack contributors"

extensions = ["openstackdocstheme", "reno.sphinxext"]
html_theme = "openstackdocs"

openstackdocs_repo_name = "openstack/imagebackend"
openstackdocs_auto_name = False
# One document for all versions; it has none of its own.
openstackdocs_auto_version = False
version = ""
release = ""
