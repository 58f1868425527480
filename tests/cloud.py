# SPDX-License-Identifier: Apache-2.0
"""A real cloud for the tests: the test bed's, or the one that ``OS_CLOUD`` names.

Its administrator makes two projects with a member each and a service user for the
tests, and removes them afterwards.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class User:
    """Somebody with a project.

    :ivar connection: openstacksdk's.
    """

    connection: Any
    project_id: str
    options: dict[str, str]

    @property
    def auth(self) -> Any:
        """The keystoneauth plugin, as a compute service passes it."""
        return self.connection.session.auth


@dataclass(frozen=True)
class Cloud:
    admin: Any
    member: User
    other: User
    service: User

    def section(self, group: str) -> str:
        """A group of a configuration file that logs in as the service user."""
        lines = [f"[{group}]", "auth_type = password"]
        lines += [f"{key} = {value}" for key, value in self.service.options.items()]
        return "\n".join([*lines, ""])


def cloud_of_the_bed() -> Iterator[Cloud]:
    """Under ``make test`` it is there, or the tests fail."""
    import openstack

    name = os.environ.get("OS_CLOUD")
    if not name:
        if "OS_CLIENT_CONFIG_FILE" not in os.environ:
            if "IMAGEBACKEND_TESTBED" in os.environ:
                pytest.fail("the test bed runs without Keystone")
            pytest.skip("no cloud: tools/testbed run COMMAND brings one up")
        name = "testbed-admin"
    admin = openstack.connect(cloud=name)
    with (
        user_of(admin, "member", ("member",)) as member,
        user_of(admin, "other", ("member",)) as other,
        user_of(admin, "service", ("admin", "service"), "service") as service,
    ):
        yield Cloud(admin, member, other, service)


@contextmanager
def user_of(
    admin: Any, name: str, roles: tuple[str, ...], project_name: str | None = None
) -> Iterator[User]:
    import openstack

    identity = admin.identity
    unique = f"imagebackend-test-{name}-{uuid.uuid4().hex[:8]}"
    password = secrets.token_hex(16)
    if project_name:
        project = identity.find_project(project_name, ignore_missing=False)
    else:
        project = identity.create_project(name=unique, domain_id="default")
    user = identity.create_user(
        name=unique,
        password=password,
        domain_id="default",
        default_project_id=project.id,
    )
    for role in roles:
        found = identity.find_role(role, ignore_missing=False)
        identity.assign_project_role_to_user(project, user, found)
    options = {
        "auth_url": admin.config.get_auth_args()["auth_url"],
        "username": unique,
        "password": password,
        "project_id": project.id,
        "user_domain_id": "default",
    }
    connection = openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        region_name=admin.config.get_region_name(),
        auth_type="password",
        auth=options,
    )
    try:
        yield User(connection, project.id, options)
    finally:
        connection.close()
        identity.delete_user(user)
        if not project_name:
            identity.delete_project(project)


def wait(done: Callable[[], bool], what: str, limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.2)
