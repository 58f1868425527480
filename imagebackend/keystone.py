# SPDX-License-Identifier: Apache-2.0
"""Sessions of keystoneauth, for a group of options.

Requests carry the service user's token beside the caller's: that is what Cinder and
Glance go by when a request is one of a service (OSSA-2023-003).
"""

from __future__ import annotations

from typing import Any, cast

from keystoneauth1 import exceptions as ks
from keystoneauth1 import loading, service_token
from keystoneauth1.session import Session
from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.conf.keystone import register_keystone


def service_session(conf: cfg.ConfigOpts, group: str, what: str) -> Session:
    """A session as the group's service user; its token is there twice, as the user's
    and as the service's.

    :param what: that needs it, for messages.
    :raises ConfigError: the group does not say who that is.
    """
    register_keystone(conf, group)
    if not conf[group].auth_type:
        raise exc.ConfigError(
            f"[{group}] auth_type is not set: {what} needs a service user (auth_type "
            f"= password, auth_url, username, password, project_name, "
            f"user_domain_name, project_domain_name)",
            group=group,
        )
    try:
        auth = loading.load_auth_from_conf_options(conf, group)
    except ks.ClientException as error:
        raise exc.ConfigError(f"[{group}]: {error}", group=group) from error
    return _session(conf, group, auth, auth)


def caller_session(
    conf: cfg.ConfigOpts, group: str, auth: Any, mine: Session
) -> Session:
    """A session as the caller, with the service user's token beside.

    :param mine: of the service user.
    """
    wrapper = cast(service_token.ServiceTokenAuthWrapper, mine.auth)
    return _session(conf, group, auth, wrapper.service_auth)


def _session(conf: cfg.ConfigOpts, group: str, user: Any, service: Any) -> Session:
    wrapped = service_token.ServiceTokenAuthWrapper(user, service)
    session: Session = loading.load_session_from_conf_options(conf, group, auth=wrapped)
    return session
