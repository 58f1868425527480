# SPDX-License-Identifier: Apache-2.0
"""Glance with a store of files and one of RBD, the default."""

from __future__ import annotations

from pathlib import Path

from bed.ceph import Ceph
from bed.keystone import Keystone
from bed.services import Service, Services

_CONF = """\
[DEFAULT]
use_stderr = true
enabled_backends = file:file,rbd:rbd
enabled_import_methods = [glance-direct,copy-image]
# An image's pool is told to those who may clone it, and to tenants too.
show_image_direct_url = true
show_multiple_locations = true

[database]
connection = {database}

[oslo_concurrency]
lock_path = {folder}/locks

[glance_store]
default_backend = rbd

[file]
filesystem_store_datadir = {folder}/images

[rbd]
rbd_store_pool = images
rbd_store_user = glance
rbd_store_ceph_conf = {ceph}

[os_glance_staging_store]
filesystem_store_datadir = {folder}/staging

[os_glance_tasks_store]
filesystem_store_datadir = {folder}/tasks

[paste_deploy]
flavor = keystone
config_file = {venv}/etc/glance/glance-api-paste.ini

[keystone_authtoken]
www_authenticate_uri = {keystone}
service_token_roles = service
service_token_roles_required = true
{login}"""


class Glance(Service):
    name = "glance"
    needs = ("mariadb", "services", "keystone", "ceph")
    processes = ("glance",)

    @property
    def conf(self) -> Path:
        # The name that it looks for in the folder that it is given.
        return self.folder / "glance-api.conf"

    def write_files(self) -> None:
        for each in ("images", "staging", "tasks"):
            (self.folder / each).mkdir(exist_ok=True)
        keystone = Keystone(self.bed)
        text = _CONF.format(
            database=self.database,
            folder=self.folder,
            ceph=Ceph(self.bed).conf,
            venv=Services.venv,
            keystone=keystone.url,
            login=keystone.login("glance"),
        )
        self.write_conf(text)

    def start(self) -> None:
        self.serve("glance", {"OS_GLANCE_CONFIG_DIR": str(self.folder)})
