# SPDX-License-Identifier: Apache-2.0
"""Cinder, the service: its requests, in our words.

Which request may be sent twice is known here and nowhere else: a request for a new
thing is sent once, and what became of it when its answer is lost is found out by what
it was marked with.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import requests
import requests.exceptions
import tenacity
from cinderclient import api_versions, client
from cinderclient import exceptions as cinder_exc
from keystoneauth1 import exceptions as ks
from keystoneauth1.session import Session
from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend.backends.waiting import Poller
from imagebackend.keystone import caller_session, service_session
from imagebackend.model import JSON

LOG = log.getLogger(__name__)
# Bodies have connection info, which has passwords: whatever the level of others, the
# library's own log of them stays off.
_BODIES = logging.getLogger(f"{__name__}.requests")
_BODIES.setLevel(logging.WARNING)

T = TypeVar("T")

#: Attachments are completed since then (cinder/api/openstack/
#: rest_api_version_history.rst).
FLOOR = (3, 44)
#: The latest that this module knows.
_LATEST = (3, 71)
ATTACH_MODE, REIMAGE = 54, 68
_SERVICE_TYPE = "block-storage"
#: Keystone's errors that say that this host is set up wrongly.
_SETUP = (ks.AuthPluginException, ks.CatalogException, ks.Unauthorized, ks.Forbidden)
_LOST = (
    requests.exceptions.RequestException,
    ks.ConnectFailure,
    ks.DiscoveryFailure,
    ks.ConnectionError,
    OSError,
)
#: Seconds that a service which is too busy may put us off for.
_LONGEST_AFTER = 30
#: So many things are looked at one by one; more of them in one list.
_FEW = 2
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 8.0
#: Seconds for which what a type of volumes is like is taken for granted.
_KNOWN_FOR = 60.0


@dataclass(frozen=True)
class VolumeType:
    """A volume type, with what its pools say of themselves.

    :ivar protocol: as pools have it (``ceph``, ``NFS``, ``iSCSI``); empty: not known.
    :ivar grows_attached: False if a pool of it says that it cannot.
    :ivar encryption: provider, where volumes of it are encrypted.
    """

    id: str
    name: str
    is_public: bool
    extra_specs: Mapping[str, str]
    protocol: str = ""
    grows_attached: bool = True
    encryption: str = ""

    @property
    def multiattach(self) -> bool:
        return self.extra_specs.get("multiattach", "").lower() == "<is> true"


class Cinder:
    """One Cinder, as the service user of a group of options. Keeps its arguments.

    :param group: the backend's name, which is that of the group.
    :param mine: asks for the volumes that this host has made.
    """

    def __init__(
        self,
        group: str,
        conf: cfg.ConfigOpts,
        mine: Callable[[], Sequence[JSON]],
    ) -> None:
        self.group = group
        self.conf = conf
        self._mine = mine
        self._lock = threading.Lock()
        self._made: _Made | None = None
        self._facts: dict[str, tuple[float, Any]] = {}
        self.poller: Poller[JSON] = Poller(
            self._look, self._options.poll_first, self._options.poll_longest
        )

    @property
    def _options(self) -> cfg.ConfigOpts.GroupAttr:
        group: cfg.ConfigOpts.GroupAttr = self.conf[self.group]
        return group

    def close(self) -> None:
        with self._lock:
            made, self._made = self._made, None
        if made is not None and made.session.session is not None:
            made.session.session.close()

    # --- what it is ----------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return self._connected().endpoint

    @property
    def project_id(self) -> str:
        """The service user's project."""
        return self._connected().project_id

    @property
    def auth(self) -> Any:
        """The service user's plugin of keystoneauth."""
        return self._connected().session.auth

    @property
    def version(self) -> tuple[int, int]:
        """The microversion that is spoken."""
        return self._connected().version

    @property
    def roles(self) -> set[str]:
        """The service user's, in its project."""
        session: Any = self._connected().session
        with self._errors("read this user's roles"):
            access = session.auth.user_auth.get_access(session)
            return set(access.role_names)

    def _connected(self) -> _Made:
        with self._lock:
            if self._made is None:
                self._made = self._connect()
            return self._made

    def _connect(self) -> _Made:
        session = service_session(self.conf, self.group, f"backend {self.group!r}")
        with self._errors("log in", f"Keystone ([{self.group}] auth_url)"):
            project_id = session.get_project_id()
        data = self._again(lambda: self._discover(session))
        version = min(tuple(data.max_microversion), _LATEST)
        endpoint = str(data.url).rstrip("/").removesuffix(f"/{project_id}")
        if version < FLOOR:
            raise exc.ConfigError(
                f"backend {self.group!r}: Cinder at {endpoint} speaks microversions up "
                f"to {_dotted(version)}: at least {_dotted(FLOOR)} is needed",
                backend=self.group,
            )
        return _Made(
            session,
            self._client(session, version),
            endpoint,
            str(project_id),
            (version[0], version[1]),
        )

    def _discover(self, session: Session) -> Any:
        """Where Cinder is, and which versions it speaks.

        :raises StorageUnavailable: it does not say.
        """
        options = self._options
        first = self._client(session, FLOOR).client
        try:
            with self._errors("find Cinder"):
                data = first.get_endpoint_data()
        except exc.ConfigError as error:
            raise exc.ConfigError(
                f"backend {self.group!r}: Keystone's catalog has no Cinder: "
                f"{error.__cause__} ([{self.group}] region_name = "
                f"{options.region_name}, valid_interfaces = "
                f"{options.valid_interfaces or 'public'})",
                backend=self.group,
            ) from error
        status = ""
        if data is not None and data.max_microversion is None:
            # keystoneauth makes do without an answer, whatever there was instead.
            with self._errors(f"ask Cinder at {data.url} which versions it speaks"):
                answer = session.get(data.url, raise_exc=False)
                if answer.status_code in (401, 403):
                    raise self._refused(
                        "ask which versions it speaks",
                        answer.status_code,
                        f"{answer.reason}: has the user the role service",
                    )
                status = f" (it answers {answer.status_code} {answer.reason})"
                data = first.get_endpoint_data()
        if data is None or data.max_microversion is None:
            where = data.url if data else options.endpoint_override
            raise exc.StorageUnavailable(
                f"backend {self.group!r}: Cinder at {where} does not say{status} which "
                f"versions it speaks: does it run, and is that its address, of version "
                f"3? It is from Keystone's catalog, or [{self.group}] "
                f"endpoint_override",
                backend=self.group,
            )
        return data

    def _client(self, session: Session, version: tuple[int, ...]) -> Any:
        options = self._options
        made = client.Client(
            api_versions.APIVersion(_dotted(version)),
            session=session,
            service_type=_SERVICE_TYPE,
            region_name=options.region_name,
            endpoint_type=options.valid_interfaces or "public",
            endpoint_override=options.endpoint_override,
            # The library would send what makes things again as well.
            connect_retries=0,
            # Of these Cinder says that it has not begun.
            retriable_status_codes=[429],
            status_code_retries=options.connect_retries or 0,
            logger=_BODIES,
        )
        made.client.client_name = "imagebackend"
        session.session.hooks["response"] = [_bound_delay]
        return made

    # --- requests --------------------------------------------------------------------

    def ask(
        self,
        what: str,
        request: Callable[[Any], T],
        *,
        again: bool = True,
        auth: Any = None,
    ) -> T:
        """Send a request, and translate what goes wrong.

        :param what: as ``delete volume 5f…``, for messages.
        :param request: does it, with cinderclient's client.
        :param again: it may be sent again when there was no answer.
        :param auth: of a caller, in whose name it is sent.
        :raises ObjectMissing: what it is about is not there.
        :raises StorageUnavailable: no answer; it may have been carried out.
        """
        made = self._connected()
        spoken = made.client
        if auth is not None:
            session = caller_session(self.conf, self.group, auth, made.session)
            spoken = self._client(session, made.version)

        def once() -> T:
            began = time.monotonic()
            try:
                with self._errors(what):
                    return request(spoken)
            finally:
                LOG.debug("%s: %.0f ms", what, 1000 * (time.monotonic() - began))

        return self._again(once) if again else once()

    def _again(self, once: Callable[[], T]) -> T:
        """Until there is an answer, as often as the operator says."""
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(exc.StorageUnavailable),
            stop=tenacity.stop_after_attempt(1 + (self._options.connect_retries or 0)),
            wait=tenacity.wait_exponential(_FIRST_PAUSE, _LAST_PAUSE),
            reraise=True,
        )(once)

    @contextmanager
    def _errors(self, what: str, who: str = "Cinder") -> Iterator[None]:
        """The libraries' errors, in our words. :param who: is asked."""
        try:
            yield
        except cinder_exc.ClientException as error:
            if error.code == 404 and not _is_cinders(str(error.message)):
                raise exc.StorageUnavailable(
                    f"backend {self.group!r}: cannot {what}: something answers 404, "
                    f"and not as Cinder does: {error.message}: is there a proxy, or a "
                    f"wrong path in Keystone's catalog?",
                    backend=self.group,
                ) from error
            raise self._refused(what, error.code, str(error.message)) from error
        except ks.HttpError as error:
            raise self._not_let_in(
                what, error.http_status, str(error.message)
            ) from error
        except _SETUP as error:
            raise exc.ConfigError(
                f"backend {self.group!r}: cannot {what}: {error}: is [{self.group}] "
                f"right?",
                backend=self.group,
            ) from error
        except _LOST as error:
            raise exc.StorageUnavailable(
                f"backend {self.group!r}: cannot {what}: {who} does not answer: "
                f"{error}",
                backend=self.group,
            ) from error
        except (ks.ClientException, cinder_exc.EndpointNotFound) as error:
            raise exc.ConfigError(
                f"backend {self.group!r}: cannot {what}: {error}", backend=self.group
            ) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # A torn answer, which the library takes for none.
            raise exc.StorageUnavailable(
                f"backend {self.group!r}: cannot {what}: {who}'s answer cannot be "
                f"read: {error!r}",
                backend=self.group,
            ) from error

    def _not_let_in(self, what: str, status: int, reason: str) -> exc.ImageBackendError:
        text = f"backend {self.group!r}: cannot {what}: Keystone answers {status}: "
        values = {"backend": self.group, "status": status}
        if status in (400, 401, 403):
            return exc.ConfigError(
                f"{text}{reason}: is the user of [{self.group}] right (username, "
                f"password, project_name, user_domain_name, project_domain_name)?",
                **values,
            )
        # Also its 404 says nothing of what was asked for.
        return exc.StorageUnavailable(text + reason, **values)

    def _refused(self, what: str, status: int, reason: str) -> exc.ImageBackendError:
        text = (
            f"backend {self.group!r}: cannot {what}: Cinder answers {status}: {reason}"
        )
        values = {"backend": self.group, "status": status}
        if status in (401, 403):
            return exc.ConfigError(
                f"{text}: may the user of [{self.group}] do that?", **values
            )
        if status == 404:
            return exc.ObjectMissing(text, **values)
        if status == 413:
            return exc.StorageFull(text, **values)
        if status == 409:
            return exc.Busy(text, **values)
        if status == 429 or status >= 500:
            return exc.StorageUnavailable(text, **values)
        return exc.StorageError(text, **values)

    # --- volumes -------------------------------------------------------------------

    def volume(self, volume_id: str) -> JSON | None:
        """The volume as Cinder has it; None: it answered that there is none."""
        try:
            return self.ask(
                f"read volume {volume_id}",
                lambda spoken: _plain(spoken.volumes.get(volume_id)),
            )
        except exc.ObjectMissing:
            return None

    def volumes(self, project_id: str | None = None, **metadata: str) -> list[JSON]:
        """All volumes of the service's project, or of another one, with this metadata.

        :param project_id: empty: of every project.
        """
        search: dict[str, Any] = {}
        if metadata:
            search["metadata"] = dict(metadata)
        if project_id is not None and project_id != self.project_id:
            search["all_tenants"] = 1
            if project_id:
                search["project_id"] = project_id
        return self.ask(
            "list volumes",
            lambda spoken: [
                _plain(each) for each in spoken.volumes.list(search_opts=search)
            ],
        )

    def encryption(self, volume_id: str) -> JSON:
        """Of an encrypted volume: ``provider``, ``encryption_key_id`` and more."""
        return self.ask(
            f"read the encryption of volume {volume_id}",
            lambda spoken: dict(spoken.volumes.get_encryption_metadata(volume_id)),
        )

    def wait(
        self,
        volume_id: str,
        done: Callable[[JSON | None], bool],
        timeout: float,
        what: str,
    ) -> JSON | None:
        """Until the volume is as wanted. :param what: as ``volume 5f… is gone``."""

        def late(seen: JSON | None) -> exc.StorageUnavailable:
            status = seen["status"] if seen else "not seen"
            return exc.StorageUnavailable(
                f"backend {self.group!r}: after {timeout:.0f} s it is not true that "
                f"{what}: its status is {status}",
                backend=self.group,
                volume=volume_id,
            )

        return self.poller.wait(volume_id, done, timeout, late)

    def _look(self, keys: Collection[str]) -> Mapping[str, JSON | None]:
        """Many things by one list, and only what is not in it one by one."""
        found: dict[str, JSON | None] = {}
        if len(keys) > _FEW:
            for each in self._mine():
                found[each["id"]] = each
        for key in keys:
            if key not in found:
                found[key] = self.volume(key)
        return found

    def reason(self, volume_id: str) -> str:
        """Why something failed, as Cinder tells users; the newest message."""
        try:
            messages = self.ask(
                f"read messages on volume {volume_id}",
                lambda spoken: [
                    _plain(each)
                    for each in spoken.messages.list(
                        search_opts={"resource_uuid": volume_id}
                    )
                ],
            )
        except exc.ImageBackendError as error:
            return f"its reason is not known ({error.message})"
        if not messages:
            return "Cinder gives no reason: its log may have one"
        newest = max(messages, key=lambda each: str(each.get("created_at")))
        return str(newest["user_message"])

    # --- attachments -----------------------------------------------------------------

    def attachments(self, volume: JSON) -> list[JSON]:
        search: dict[str, Any] = {"volume_id": volume["id"]}
        if project_of(volume) != self.project_id:
            search["all_tenants"] = 1
        return self._attachments(
            f"list the attachments of volume {volume['id']}", search
        )

    def all_attachments(self) -> list[JSON]:
        """Of the service's project."""
        return self._attachments("list attachments", {})

    def _attachments(self, what: str, search: Mapping[str, Any]) -> list[JSON]:
        return self.ask(
            what,
            lambda spoken: [
                _plain(each)
                for each in spoken.attachments.list(detailed=True, search_opts=search)
            ],
        )

    def all_snapshots(self) -> list[JSON]:
        """Of the service's project."""
        return self.ask(
            "list snapshots",
            lambda spoken: [_plain(each) for each in spoken.volume_snapshots.list()],
        )

    def attachment(self, attachment_id: str) -> JSON | None:
        try:
            return self.ask(
                f"read attachment {attachment_id}",
                lambda spoken: _plain(spoken.attachments.show(attachment_id)),
            )
        except exc.ObjectMissing:
            return None

    def delete_attachment(self, attachment_id: str) -> None:
        """Absent is success."""
        with suppress(exc.ObjectMissing):
            self.ask(
                f"delete attachment {attachment_id}",
                lambda spoken: spoken.attachments.delete(attachment_id),
            )

    # --- types ---------------------------------------------------------------------

    def types(self) -> list[JSON]:
        """All that this user sees; private ones too, if it is an administrator."""
        return self.ask(
            "list volume types",
            lambda spoken: [
                _plain(each) for each in spoken.volume_types.list(is_public=None)
            ],
        )

    def default_type(self) -> str:
        """The id of the type that a volume gets where none is asked for."""
        return self.ask(
            "read the default volume type",
            lambda spoken: str(spoken.volume_types.default().id),
        )

    def may_use(self, type_id: str, project_id: str) -> bool:
        """Whether a project may use a private type."""
        listed = self.ask(
            f"read who may use volume type {type_id}",
            lambda spoken: [
                each.project_id for each in spoken.volume_type_access.list(type_id)
            ],
        )
        return project_id in listed

    def described(self, raw: JSON) -> VolumeType:
        """A type with what its pools are like."""
        extra = raw.get("extra_specs") or {}
        pools = self._known("pools", self.pools)
        wanted = extra.get("volume_backend_name")
        mine = [
            each["capabilities"]
            for each in pools
            if wanted in (None, each["capabilities"].get("volume_backend_name"))
        ]
        protocols = {_protocol(each.get("storage_protocol")) for each in mine}
        return VolumeType(
            raw["id"],
            raw["name"],
            bool(
                raw.get("os-volume-type-access:is_public", raw.get("is_public", True))
            ),
            extra,
            protocols.pop() if len(protocols) == 1 else "",
            all(each.get("online_extend_support", True) for each in mine),
            self._known(f"encryption {raw['id']}", lambda: self._encryption(raw["id"])),
        )

    def _encryption(self, type_id: str) -> str:
        found = self.ask(
            f"read the encryption of volume type {type_id}",
            lambda spoken: _plain(spoken.volume_encryption_types.get(type_id)),
        )
        return str(found.get("provider") or "")

    def pools(self) -> Sequence[JSON]:
        """What schedulers know; nothing where this user may not ask."""
        try:
            return self.ask(
                "list pools",
                lambda spoken: [
                    _plain(each) for each in spoken.pools.list(detailed=True)
                ],
            )
        except exc.ConfigError as error:
            LOG.info("%s", error)
            return []

    def _known(self, key: str, ask: Callable[[], T]) -> T:
        now = time.monotonic()
        known = self._facts.get(key)
        if known is None or known[0] < now:
            known = (now + _KNOWN_FOR, ask())
            self._facts[key] = known
        answer: T = known[1]
        return answer


@dataclass(frozen=True)
class _Made:
    session: Session
    client: Any
    endpoint: str
    project_id: str
    version: tuple[int, int]


def project_of(volume: JSON) -> str:
    return str(volume.get("os-vol-tenant-attr:tenant_id") or "")


def _plain(resource: Any) -> JSON:
    """What the library read, without the library."""
    found: JSON = resource.to_dict()
    return found


def _is_cinders(message: str) -> bool:
    """Whether a 404 is about the thing that was asked for, in Cinder's words; that of a
    proxy, or of a path that nobody serves, has no words or a page's."""
    return message.lower() not in ("not found", "n/a", "none") and "<" not in message


def _bound_delay(answer: requests.Response, **_: object) -> None:
    """The library sleeps for as long as it is told to, days too."""
    told = answer.headers.get("Retry-After", "")
    if told.isdigit() and int(told) > _LONGEST_AFTER:
        answer.headers["Retry-After"] = str(_LONGEST_AFTER)


def _protocol(told: object) -> str:
    # Some drivers have several names for theirs.
    first = told[0] if isinstance(told, list) and told else told
    return str(first or "")


def _dotted(version: Sequence[int]) -> str:
    return f"{version[0]}.{version[1]}"
