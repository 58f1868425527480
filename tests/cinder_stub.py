# SPDX-License-Identifier: Apache-2.0
"""A Keystone and a Cinder in this process, for what no real one does on demand.

As much of both as :mod:`imagebackend.backends.cinder` asks for, in memory, over HTTP.
It knows no more than it must: what a volume is like, the real Cinder's tests say.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

JSON = dict[str, Any]
#: The service user's, and what must be in no log and no exception.
USER, PASSWORD, PROJECT = "imagebackend", "pass-4f1d-word", "5e" * 16
TENANT, TENANT_PASSWORD, TENANT_PROJECT = "tenant", "other-77aa-word", "7e" * 16
#: In connection info.
AUTH_PASSWORD = "chap-9c2e-secret"
_IDENTITY, _VOLUME = "/identity/v3", "/volume/v3"


@dataclass(frozen=True)
class Request:
    """One that arrived. :ivar path: without the service's prefix and the project."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: JSON


@dataclass(frozen=True)
class Answer:
    """What happens to a request instead of the usual.

    :ivar status: of an answer without any work being done; None: the work is done.
    :ivar body: of that answer; bytes are sent as they are.
    :ivar cut: the connection ends in the middle of the body.
    :ivar lost: the connection ends without an answer: ``before`` the work, which is
        never done; ``after`` it; or ``during`` it: the work is done ``delay`` seconds
        later.
    :ivar delay: seconds before the answer.
    """

    status: int | None = None
    body: JSON | bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    lost: str = ""
    delay: float = 0.0


@dataclass
class _Program:
    method: str
    path: re.Pattern[str]
    answer: Answer
    times: int


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_KINDS = {
    400: "badRequest",
    401: "unauthorized",
    403: "forbidden",
    404: "itemNotFound",
    409: "conflictingRequest",
    413: "overLimit",
}


def fault(status: int, message: str) -> JSON:
    """An error as Cinder words it."""
    kind = _KINDS.get(status, "computeFault")
    return {kind: {"code": status, "message": message}}


class CinderStub:
    """Both services. Use as a context manager.

    :ivar requests: all that arrived for Cinder, in order. :ivar logins: for Keystone.
    :ivar creation: seconds until a new volume is ``available``; ``deletion``: until a
        deleted one is gone.
    :ivar failing: so many of the next volumes end in ``error``.
    :ivar quota: of volumes; None: no limit.
    :ivar catalog: whether Keystone's has this Cinder.
    """

    def __init__(
        self, max_version: str = "3.71", creation: float = 0.0, deletion: float = 0.0
    ) -> None:
        self.max_version = max_version
        self.creation = creation
        self.deletion = deletion
        self.failing = 0
        self.quota: int | None = None
        self.catalog = True
        self.requests: list[Request] = []
        self.logins: list[Request] = []
        self.tokens: dict[str, str] = {}
        self.users = {
            USER: (PASSWORD, PROJECT),
            TENANT: (TENANT_PASSWORD, TENANT_PROJECT),
        }
        self.volumes: dict[str, JSON] = {}
        self.attachments: dict[str, JSON] = {}
        self.snapshots: dict[str, JSON] = {}
        self.messages: list[JSON] = []
        self.types: dict[str, JSON] = {}
        self.access: dict[str, list[str]] = {}
        self.encryption: dict[str, JSON] = {}
        self.pools: list[JSON] = []
        self.connection_info: JSON = {
            "driver_volume_type": "iscsi",
            "auth_username": "chap",
            "auth_password": AUTH_PASSWORD,
        }
        self._programs: list[_Program] = []
        self._lock = threading.RLock()
        self._made = 0
        self._late: list[threading.Thread] = []
        self.default_type = self.add_type("plain")
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.stub = self
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(0.01), daemon=True
        )

    def __enter__(self) -> CinderStub:
        self._thread.start()
        return self

    def __exit__(self, *_args: object) -> None:
        self.settle()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- what a test says ------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of a backend, as the service user."""
        return {
            "auth_type": "password",
            "auth_url": self.url + _IDENTITY,
            "username": USER,
            "password": PASSWORD,
            "project_name": "service",
            "user_domain_name": "Default",
            "project_domain_name": "Default",
            "region_name": "here",
        }

    def program(self, method: str, path: str, answer: Answer, times: int = 1) -> None:
        """:param path: all of it, as a regular expression; Keystone's begins with
        ``/identity``, Cinder's own documents with ``/volume``."""
        self._programs.append(_Program(method, re.compile(path), answer, times))

    def sent(self, method: str, path: str) -> list[Request]:
        """Requests that arrived for a path, a regular expression for all of it."""
        with self._lock:
            return [
                each
                for each in self.requests
                if each.method == method and re.fullmatch(path, each.path)
            ]

    def settle(self) -> None:
        """Until all requests have ended whose answers were lost."""
        for each in self._late:
            each.join()

    def add_type(self, name: str, *, public: bool = True, **specs: str) -> str:
        type_id = str(uuid.uuid4())
        self.types[type_id] = {
            "id": type_id,
            "name": name,
            "is_public": public,
            "os-volume-type-access:is_public": public,
            "extra_specs": {
                key.replace("__", ":"): each for key, each in specs.items()
            },
        }
        self.access[type_id] = []
        return type_id

    def add_volume(self, project_id: str = PROJECT, **facts: Any) -> JSON:
        with self._lock:
            self._made += 1
            volume_id = str(uuid.uuid4())
            made = {
                "id": volume_id,
                "name": "",
                "size": 1,
                "status": "available",
                "metadata": {},
                "attachments": [],
                "created_at": f"2026-01-01T00:00:00.{self._made:06}",
                "os-vol-tenant-attr:tenant_id": project_id,
                "volume_type": "plain",
                **facts,
            }
            self.volumes[volume_id] = made
            return made

    # --- the work --------------------------------------------------------------------

    def _answer_of(self, method: str, path: str) -> Answer:
        with self._lock:
            for each in self._programs:
                wanted = each.method in (method, "*") and each.path.fullmatch(path)
                if wanted and each.times:
                    each.times -= 1
                    return each.answer
        return Answer()

    def _pass_time(self) -> None:
        now = time.monotonic()
        for volume in list(self.volumes.values()):
            due = volume.get("_due")
            if due is None or now < due[0]:
                continue
            del volume["_due"]
            if due[1] == "gone":
                del self.volumes[volume["id"]]
            else:
                volume["status"] = due[1]

    def _later(self, volume: JSON, seconds: float, now: str, then: str) -> None:
        volume["status"] = now
        volume["_due"] = (time.monotonic() + seconds, then)

    def work(self, request: Request, project_id: str) -> tuple[int, JSON | None]:
        with self._lock:
            self._pass_time()
            for method, pattern, handler in _ROUTES:
                match = re.fullmatch(pattern, request.path)
                if match and method == request.method:
                    answer = handler(self, request, project_id, *match.groups())
                    return (202 if method in ("POST", "DELETE") else 200), answer
        raise _Refused(404, "The resource could not be found.")

    def _volume(self, volume_id: str) -> JSON:
        if volume_id not in self.volumes:
            raise _Refused(404, f"Volume {volume_id} could not be found.")
        return self.volumes[volume_id]

    def _get_type(self, _request: Request, _project: str, type_id: str) -> JSON:
        if type_id == "default":
            type_id = self.default_type
        return {"volume_type": self.types[type_id]}

    def _list_types(self, _request: Request, _project: str) -> JSON:
        return {"volume_types": list(self.types.values())}

    def _type_access(self, _request: Request, _project: str, type_id: str) -> JSON:
        return {
            "volume_type_access": [
                {"volume_type_id": type_id, "project_id": each}
                for each in self.access[type_id]
            ]
        }

    def _type_encryption(self, _request: Request, _project: str, type_id: str) -> JSON:
        return self.encryption.get(type_id, {})

    def _list_pools(self, _request: Request, _project: str) -> JSON:
        return {"pools": self.pools}

    def _list_messages(self, request: Request, _project: str) -> JSON:
        wanted = request.query.get("resource_uuid")
        found = [each for each in self.messages if each["resource_uuid"] == wanted]
        return {"messages": found}

    def _create_volume(self, request: Request, project_id: str) -> JSON:
        if self.quota is not None and len(self.volumes) >= self.quota:
            raise _Refused(
                413,
                "VolumeLimitExceeded: Maximum number of volumes allowed "
                f"({self.quota}) exceeded for quota 'volumes'.",
            )
        wanted = request.body["volume"]
        made = self.add_volume(
            project_id,
            name=wanted.get("name"),
            size=wanted["size"],
            metadata=wanted.get("metadata") or {},
            volume_type=wanted.get("volume_type"),
            availability_zone=wanted.get("availability_zone"),
        )
        then = "available"
        if self.failing:
            self.failing -= 1
            then = "error"
            self.messages.append(
                {
                    "id": str(uuid.uuid4()),
                    "resource_uuid": made["id"],
                    "created_at": made["created_at"],
                    "user_message": "schedule allocate volume:No room in any pool.",
                }
            )
        self._later(made, self.creation, "creating", then)
        return {"volume": _shown(made)}

    def _list_volumes(self, request: Request, project_id: str) -> JSON:
        wanted = ast.literal_eval(request.query.get("metadata", "{}"))
        # Empty: of every project.
        project = project_id
        if "all_tenants" in request.query:
            project = request.query.get("project_id", "")
        return {
            "volumes": [
                _shown(each)
                for each in self.volumes.values()
                if wanted.items() <= each["metadata"].items()
                and project in ("", each["os-vol-tenant-attr:tenant_id"])
            ]
        }

    def _get_volume(self, _request: Request, _project: str, volume_id: str) -> JSON:
        return {"volume": _shown(self._volume(volume_id))}

    def _delete_volume(
        self, _request: Request, _project: str, volume_id: str
    ) -> JSON | None:
        volume = self._volume(volume_id)
        if volume["status"] not in ("available", "error", "error_deleting"):
            raise _Refused(
                400,
                "Invalid volume: Volume status must be available or error or "
                "error_deleting, and it must not have attachments.",
            )
        self._later(volume, self.deletion, "deleting", "gone")
        return None

    def _set_metadata(self, request: Request, _project: str, volume_id: str) -> JSON:
        volume = self._volume(volume_id)
        volume["metadata"] |= request.body["metadata"]
        return {"metadata": volume["metadata"]}

    def _volume_action(
        self, request: Request, _project: str, volume_id: str
    ) -> JSON | None:
        volume = self._volume(volume_id)
        ((verb, says),) = request.body.items()
        if verb == "os-extend":
            volume["size"] = says["new_size"]
        elif verb == "os-reset_status":
            volume["status"] = says["status"]
        else:
            raise _Refused(400, f"There is no such action: {verb}")
        return None

    def _create_attachment(self, request: Request, _project: str) -> JSON:
        wanted = request.body["attachment"]
        volume = self._volume(wanted["volume_uuid"])
        if volume["status"] not in ("available", "reserved", "in-use"):
            raise _Refused(
                400, f"Invalid volume: Volume {volume['id']} is {volume['status']}."
            )
        connector = wanted.get("connector")
        made = {
            "id": str(uuid.uuid4()),
            "volume_id": volume["id"],
            "instance": wanted.get("instance_uuid"),
            "status": "attaching" if connector else "reserved",
            "attach_mode": wanted.get("mode", ""),
            "connection_info": dict(self.connection_info) if connector else {},
            "_host": (connector or {}).get("host"),
        }
        self.attachments[made["id"]] = made
        self._attachments_changed(volume)
        return {"attachment": _shown(made)}

    def _attachments_changed(self, volume: JSON) -> None:
        mine = [
            each
            for each in self.attachments.values()
            if each["volume_id"] == volume["id"]
        ]
        hosts = [each for each in mine if each["_host"]]
        volume["attachments"] = [
            {"attachment_id": each["id"], "host_name": each["_host"]} for each in hosts
        ]
        status = {each["status"] for each in mine}
        for name, shown in (
            ("attached", "in-use"),
            ("attaching", "attaching"),
            ("reserved", "reserved"),
        ):
            if name in status:
                volume["status"] = shown
                return
        volume["status"] = "available"

    def _attachment(self, attachment_id: str) -> JSON:
        if attachment_id not in self.attachments:
            raise _Refused(404, f"Volume attachment {attachment_id} was not found.")
        return self.attachments[attachment_id]

    def _get_attachment(self, _request: Request, _project: str, which: str) -> JSON:
        return {"attachment": _shown(self._attachment(which))}

    def _list_attachments(self, request: Request, _project: str) -> JSON:
        wanted = request.query.get("volume_id")
        found = [
            _shown(each)
            for each in self.attachments.values()
            if wanted in (None, each["volume_id"])
        ]
        return {"attachments": found}

    def _delete_attachment(self, _request: Request, _project: str, which: str) -> JSON:
        found = self._attachment(which)
        del self.attachments[which]
        if found["volume_id"] in self.volumes:
            self._attachments_changed(self.volumes[found["volume_id"]])
        return {"attachments": []}

    def _complete_attachment(
        self, _request: Request, _project: str, which: str
    ) -> JSON | None:
        found = self._attachment(which)
        found["status"] = "attached"
        self._attachments_changed(self._volume(found["volume_id"]))
        return None

    def _create_snapshot(self, request: Request, _project: str) -> JSON:
        wanted = request.body["snapshot"]
        volume = self._volume(wanted["volume_id"])
        made = {
            "id": str(uuid.uuid4()),
            "volume_id": volume["id"],
            "name": wanted.get("name"),
            "size": volume["size"],
            "status": "available",
        }
        self.snapshots[made["id"]] = made
        return {"snapshot": made}

    def _list_snapshots(self, request: Request, _project: str) -> JSON:
        found = [
            each
            for each in self.snapshots.values()
            if request.query.get("volume_id") in (None, each["volume_id"])
            and request.query.get("name") in (None, each["name"])
        ]
        return {"snapshots": found}

    def _get_snapshot(self, _request: Request, _project: str, which: str) -> JSON:
        if which not in self.snapshots:
            raise _Refused(404, f"Snapshot {which} could not be found.")
        return {"snapshot": self.snapshots[which]}

    def _delete_snapshot(
        self, request: Request, project_id: str, which: str
    ) -> JSON | None:
        self._get_snapshot(request, project_id, which)
        del self.snapshots[which]
        return None

    # --- Keystone --------------------------------------------------------------------

    def log_in(self, body: JSON) -> tuple[JSON, str]:
        """The token's description, and the token."""
        user = body["auth"]["identity"]["password"]["user"]
        password, project_id = self.users.get(user["name"], ("", ""))
        if user["password"] != password:
            raise _Refused(401, "The request you have made requires authentication.")
        token = f"token-{uuid.uuid4()}"
        self.tokens[token] = project_id
        catalog = []
        if self.catalog:
            endpoint = {
                "id": "cinder-endpoint",
                "interface": "public",
                "region": "here",
                "region_id": "here",
                "url": f"{self.url}{_VOLUME}/{project_id}",
            }
            catalog.append(
                {
                    "id": "cinder",
                    "type": "block-storage",
                    "name": "cinder",
                    "endpoints": [endpoint],
                }
            )
        domain = {"id": "default", "name": "Default"}
        described = {
            "methods": ["password"],
            "user": {"id": user["name"], "name": user["name"], "domain": domain},
            "project": {"id": project_id, "name": "project", "domain": domain},
            "roles": [{"id": "admin", "name": "admin"}],
            "issued_at": "2026-01-01T00:00:00.000000Z",
            "expires_at": "2099-01-01T00:00:00.000000Z",
            "catalog": catalog,
        }
        return {"token": described}, token

    def identity_document(self) -> JSON:
        link = {"rel": "self", "href": f"{self.url}{_IDENTITY}/"}
        return {"version": {"id": "v3.14", "status": "stable", "links": [link]}}

    def volume_document(self) -> JSON:
        return {
            "versions": [
                {
                    "id": "v3.0",
                    "status": "CURRENT",
                    "version": self.max_version,
                    "min_version": "3.0",
                    "links": [{"rel": "self", "href": f"{self.url}{_VOLUME}/"}],
                }
            ]
        }


_ROUTES: list[tuple[str, str, Callable[..., JSON | None]]] = [
    ("GET", "/types", CinderStub._list_types),
    ("GET", "/types/([^/]+)", CinderStub._get_type),
    ("GET", "/types/([^/]+)/encryption", CinderStub._type_encryption),
    ("GET", "/types/([^/]+)/os-volume-type-access", CinderStub._type_access),
    ("GET", "/scheduler-stats/get_pools", CinderStub._list_pools),
    ("GET", "/messages", CinderStub._list_messages),
    ("POST", "/volumes", CinderStub._create_volume),
    ("GET", "/volumes(?:/detail)?", CinderStub._list_volumes),
    ("GET", "/volumes/([^/]+)", CinderStub._get_volume),
    ("DELETE", "/volumes/([^/]+)", CinderStub._delete_volume),
    ("POST", "/volumes/([^/]+)/metadata", CinderStub._set_metadata),
    ("POST", "/volumes/([^/]+)/action", CinderStub._volume_action),
    ("POST", "/attachments", CinderStub._create_attachment),
    ("GET", "/attachments(?:/detail)?", CinderStub._list_attachments),
    ("GET", "/attachments/([^/]+)", CinderStub._get_attachment),
    ("DELETE", "/attachments/([^/]+)", CinderStub._delete_attachment),
    ("POST", "/attachments/([^/]+)/action", CinderStub._complete_attachment),
    ("POST", "/snapshots", CinderStub._create_snapshot),
    ("GET", "/snapshots(?:/detail)?", CinderStub._list_snapshots),
    ("GET", "/snapshots/([^/]+)", CinderStub._get_snapshot),
    ("DELETE", "/snapshots/([^/]+)", CinderStub._delete_snapshot),
]


def _shown(thing: JSON) -> JSON:
    return {key: value for key, value in thing.items() if not key.startswith("_")}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    stub: CinderStub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer is one packet: with Nagle's delay each would take 40 ms.
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def log_message(self, *_args: Any) -> None:
        """The test's output is the test's."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        stub = self.server.stub
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        text = self.rfile.read(length)
        path = parts.path.rstrip("/")
        resource = re.fullmatch(rf"{_VOLUME}/[0-9a-f]{{32}}(/.*)", path)
        request = Request(
            self.command,
            resource[1] if resource else path,
            {key: values[0] for key, values in parse_qs(parts.query).items()},
            dict(self.headers.items()),
            json.loads(text) if text else {},
        )
        with stub._lock:
            (stub.requests if resource else stub.logins).append(request)
        answer = stub._answer_of(request.method, request.path)
        if answer.lost == "during":

            def late() -> None:
                time.sleep(answer.delay)
                self._do(request, bool(resource))

            thread = threading.Thread(target=late)
            stub._late.append(thread)
            thread.start()
        elif answer.delay:
            time.sleep(answer.delay)
        if answer.lost in ("before", "during"):
            self.close_connection = True
            return
        if answer.status is None:
            status, body, headers = self._do(request, bool(resource))
        else:
            status, body, headers = answer.status, answer.body, {}
            if body is None:
                body = fault(status, "so said")
        if answer.lost:
            self.close_connection = True
            return
        self._send(status, body, {**headers, **answer.headers}, answer.cut)

    def _do(
        self, request: Request, resource: bool
    ) -> tuple[int, JSON | bytes | None, dict[str, str]]:
        stub = self.server.stub
        try:
            if resource:
                project_id = stub.tokens.get(request.headers.get("X-Auth-Token", ""))
                if project_id is None:
                    raise _Refused(401, "This server could not verify the token.")
                return *stub.work(request, project_id), {}
            if request.path == f"{_IDENTITY}/auth/tokens":
                described, token = stub.log_in(request.body)
                return 201, described, {"X-Subject-Token": token}
            if request.path == _IDENTITY:
                return 200, stub.identity_document(), {}
            if request.path in ("/volume", _VOLUME):
                return 200, stub.volume_document(), {}
            raise _Refused(404, "The resource could not be found.")
        except _Refused as error:
            if request.path.startswith("/identity"):
                said = {"error": {"code": error.status, "message": str(error)}}
                return error.status, said, {}
            return error.status, fault(error.status, str(error)), {}

    def _send(
        self,
        status: int,
        body: JSON | bytes | None,
        headers: Mapping[str, str],
        cut: bool,
    ) -> None:
        data = body if isinstance(body, bytes) else b""
        if body is not None and not isinstance(body, bytes):
            data = json.dumps(body).encode()
        self.send_response(status)
        kind = "text/html" if isinstance(body, bytes) else "application/json"
        for key, value in {"Content-Type": kind, **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if cut:
            self.close_connection = True
            data = data[: len(data) // 2]
        with contextlib.suppress(OSError):
            self.wfile.write(data)


__all__ = ["Answer", "CinderStub", "Request", "fault"]
