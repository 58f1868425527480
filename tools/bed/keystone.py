# SPDX-License-Identifier: Apache-2.0
"""Keystone, with the users and the catalog of the bed."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from bed.bed import LOOPBACK
from bed.services import REGION, Client, Service

#: Each user, its project and its roles there.
USERS = {
    "admin": ("admin", ("admin",)),
    "glance": ("service", ("admin", "service")),
    "cinder": ("service", ("admin", "service")),
    # Cinder's and Glance's default policies ask for either, call by call.
    "imagebackend": ("service", ("admin", "service")),
    "member": ("demo", ("member",)),
    "other": ("other", ("member",)),
}
#: Their names in clouds.yaml.
CLOUDS = {
    "testbed-admin": "admin",
    "testbed-service": "imagebackend",
    "testbed-member": "member",
    "testbed-other": "other",
}
#: Type of each service, by the name of its part, and what follows in its URL.
_CATALOG = (
    ("glance", "image", ""),
    ("cinder", "block-storage", "/v3"),
    # The type that older clients look for.
    ("cinder", "volumev3", "/v3"),
)
_INTERFACES = ("public", "internal")

_CONF = """\
[DEFAULT]
use_stderr = true

[database]
connection = {database}

[token]
provider = fernet
expiration = 86400

[fernet_tokens]
key_repository = {folder}/fernet

[fernet_receipts]
key_repository = {folder}/fernet

[credential]
key_repository = {folder}/credential

[identity]
# The fewest: a login costs 1 ms.
password_hash_rounds = 4

[cache]
enabled = true
backend = dogpile.cache.memory

[oslo_policy]
enforce_scope = true
"""

_CLOUD = """\
  {cloud}:
    region_name: {region}
    identity_api_version: 3
    auth_type: password
    auth:
      auth_url: {url}
      username: {user}
      password: {password}
      project_name: {project}
      user_domain_id: default
      project_domain_id: default
"""

#: How a service of the bed logs in, in its configuration.
LOGIN = """\
auth_type = password
auth_url = {url}
username = {user}
password = {password}
project_name = service
user_domain_id = default
project_domain_id = default
"""


class Keystone(Service):
    name = "keystone"
    needs = ("mariadb", "services")
    processes = ("keystone",)

    @property
    def url(self) -> str:
        return f"{super().url}/v3"

    @property
    def clouds(self) -> Path:
        return self.bed.folder / "clouds.yaml"

    def env(self) -> dict[str, str]:
        return {"OS_CLIENT_CONFIG_FILE": str(self.clouds)}

    def login(self, user: str) -> str:
        """Options of the user of a service."""
        return LOGIN.format(url=self.url, user=user, password=self._password(user))

    def client(self, part: Service, **headers: str) -> Client:
        """A service's API, for the administrator."""
        return Client(part.port, **{"X-Auth-Token": self._token(), **headers})

    # --- its pieces --------------------------------------------------------------

    def write_files(self) -> None:
        self.write_conf(_CONF.format(database=self.database, folder=self.folder))
        for repository in ("fernet", "credential"):
            keys = self.folder / repository
            if not keys.exists():
                # As its own command makes them, which takes two seconds.
                keys.mkdir(0o700)
                for key in "01":
                    (keys / key).write_bytes(base64.urlsafe_b64encode(os.urandom(32)))
        self._write_clouds()

    def _write_clouds(self) -> None:
        text = "clouds:\n" + "".join(
            _CLOUD.format(
                cloud=cloud,
                region=REGION,
                url=self.url,
                user=user,
                password=self._password(user),
                project=USERS[user][0],
            )
            for cloud, user in CLOUDS.items()
        )
        self.clouds.touch(0o600)
        self.clouds.write_text(text)

    def make_tables(self) -> None:
        super().make_tables()
        # The domain, the roles, the administrator.
        urls = (f"--bootstrap-{each}-url={self.url}" for each in _INTERFACES)
        self.manage(
            "bootstrap",
            f"--bootstrap-password={self._password('admin')}",
            f"--bootstrap-region-id={REGION}",
            *urls,
        )

    def start(self) -> None:
        self.serve("keystone", {"OS_KEYSTONE_CONFIG_FILES": str(self.conf)})

    def fill(self) -> None:
        client = self.client(self)

        def make(kind: str, **values: Any) -> str:
            made: str = client.call("POST", f"/v3/{kind}s", {kind: values})[kind]["id"]
            return made

        listed = client.call("GET", "/v3/roles")["roles"]
        roles = {role["name"]: role["id"] for role in listed}
        projects: dict[str, str] = {}
        for user, (project, names) in USERS.items():
            if user == "admin":
                continue
            if project not in projects:
                projects[project] = make("project", name=project, domain_id="default")
            number = make(
                "user",
                name=user,
                domain_id="default",
                password=self._password(user),
                default_project_id=projects[project],
            )
            for role in names:
                where = f"projects/{projects[project]}/users/{number}/roles"
                client.call("PUT", f"/v3/{where}/{roles[role]}")
        for name, kind, path in _CATALOG:
            service = make("service", name=name, type=kind)
            url = f"http://{LOOPBACK}:{self.bed.port(name)}{path}"
            for interface in _INTERFACES:
                make(
                    "endpoint",
                    service_id=service,
                    interface=interface,
                    url=url,
                    region_id=REGION,
                )

    def _password(self, user: str) -> str:
        return self.bed.secret(f"user-{user}")

    def _token(self) -> str:
        domain = {"id": "default"}
        user = {
            "name": "admin",
            "domain": domain,
            "password": self._password("admin"),
        }
        asked = {
            "identity": {"methods": ["password"], "password": {"user": user}},
            "scope": {"project": {"name": "admin", "domain": domain}},
        }
        headers, _ = Client(self.port).ask("POST", "/v3/auth/tokens", {"auth": asked})
        return str(headers["X-Subject-Token"])
