# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` go from a bare Debian 12 to the result; tox.ini has
# the finer checks.

PYTHON := .venv/bin/python
GUEST := .testbed/guest.qcow2

export IMAGEBACKEND_GUEST_IMAGE := $(CURDIR)/$(GUEST)

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help bootstrap bootstrap-testbed demo test clean

help:
	@echo 'make demo    show the library at work on real guests'
	@echo 'make test    unit and functional tests, on real libvirt, Ceph, MariaDB,'
	@echo '             PostgreSQL, Keystone, Glance and Cinder, which it brings up'
	@echo '             (ARGS="-k name -x" goes to pytest)'
	@echo 'make clean   stop what was started, remove what was made here'

bootstrap:
	@tools/bootstrap

bootstrap-testbed:
	@tools/bootstrap testbed

$(GUEST): imagebackend/testing/guest_image.py
	@mkdir -p $(@D)
	$(PYTHON) -m imagebackend.testing.guest_image $@

demo: bootstrap $(GUEST)
	tools/libvirt run .venv/bin/imagebackend demo --guest-image $(GUEST)

test: bootstrap-testbed $(GUEST)
	tools/testbed run tools/libvirt run .venv/bin/pytest tests/unit tests/functional \
		$(ARGS)

clean:
	tools/libvirt down
	tools/testbed down --wipe
	rm -rf .testbed .tox .venv .coverage* .mypy_cache .pytest_cache .ruff_cache
	rm -rf build cover dist doc/build releasenotes/build imagebackend.egg-info
	rm -f etc/imagebackend/imagebackend.conf.sample
	find imagebackend tests -name __pycache__ -prune -exec rm -rf {} +
