# SPDX-License-Identifier: Apache-2.0
"""A proxy between the library and a service, which does to one answer what networks,
load balancers and dying services do.

Requests are told by their place in a verb: the same request several times in a row, as
when something is waited for, is one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import http.client
import http.server
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_ID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")


class Fault(enum.StrEnum):
    """What happens to a request. Those of the first line never arrive."""

    REFUSED, BUSY, DOWN, GATEWAY, LIMIT = "refused", "500", "503", "504", "429"
    #: It is carried out, and the answer does not come, or not whole, or is a lie.
    LOST, CUT, AFTER = "lost", "cut", "500 after"
    #: There is no answer, and it is carried out later: just before the same is asked
    #: again, or when the verb has ended.
    SLOW, LATE = "slow", "late"


#: To a request that changes nothing these are the same as others.
OF_CHANGES = (Fault.AFTER, Fault.SLOW, Fault.LATE)
_STATUS = {Fault.BUSY: 500, Fault.DOWN: 503, Fault.GATEWAY: 504, Fault.LIMIT: 429}


@dataclass
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    fault: Fault | None = None

    @property
    def what(self) -> str:
        """As ``POST /volumes/{id}/action os-extend``."""
        path = urllib.parse.urlsplit(self.path).path
        found = [
            "{id}" if _ID.fullmatch(each) else each for each in path.split("/")[1:]
        ]
        if found[0] == "v3":
            # Some requests have the project in their path, where others have nothing.
            found = found[2 if found[1:2] == ["{id}"] else 1 :]
        told = f"{self.method} /{'/'.join(found)}"
        if found and found[-1] == "action":
            told += f" {next(iter(json.loads(self.body)))}"
        return told


@dataclass
class _Answer:
    """:ivar cut: its end does not come."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    cut: bool = False


@dataclass
class Proxy:
    """:ivar steps: requests since :meth:`forget`, those in a row once.
    :ivar watch: is told of each request, and its token, before it is carried out; it
        may wait, and may give a status to answer instead.
    """

    upstream: str
    url: str = ""
    steps: list[str] = field(default_factory=list)
    watch: Callable[[str, str], int | None] | None = None
    #: Whether the fault that was asked for has come to pass.
    fired: bool = False
    _fault: tuple[int, Fault] | None = None
    _held: list[_Request] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _running: int = 0

    def forget(self) -> None:
        with self._lock:
            self.steps = []
            self._fault, self.fired = None, False

    def at(self, step: int, fault: Fault) -> None:
        """From now on, once, at the first request of a step."""
        with self._lock:
            self.forget()
            self._fault = (step, fault)

    def release(self) -> None:
        """Carry out what was held back, and let everything pass."""
        with self._lock:
            self._fault = None
            held, self._held = self._held, []
        for each in held:
            self._forward(each)

    def quiet(self) -> bool:
        """Whether no request is on its way, also of clients that have gone."""
        with self._lock:
            return self._running == 0

    def handle(self, request: _Request) -> _Answer | None:
        """The answer; None: there is none, and the connection ends."""
        with self._lock:
            self._running += 1
        try:
            return self._handle(request)
        finally:
            with self._lock:
                self._running -= 1

    def _handle(self, request: _Request) -> _Answer | None:
        fault = self._arrived(request)
        if fault in _STATUS:
            return _told(_STATUS[fault])
        if fault is Fault.REFUSED:
            return None
        if fault in (Fault.SLOW, Fault.LATE):
            request.fault = fault
            with self._lock:
                self._held.append(request)
            return None
        self._again(request)
        if self.watch is not None:
            status = self.watch(request.what, request.headers.get("X-Auth-Token", ""))
            if status is not None:
                return _told(status)
        answer = self._forward(request)
        if fault is Fault.LOST:
            return None
        if fault is Fault.AFTER:
            return _told(500)
        if fault is Fault.CUT:
            # Of nothing, no half can be missing.
            return dataclasses.replace(answer, cut=True) if answer.body else None
        return answer

    def _arrived(self, request: _Request) -> Fault | None:
        with self._lock:
            if not self.steps or self.steps[-1] != request.what:
                self.steps.append(request.what)
            if self._fault is None or self._fault[0] != len(self.steps) - 1:
                return None
            fault, self._fault, self.fired = self._fault[1], None, True
            return fault

    def _again(self, request: _Request) -> None:
        """What was held back comes in before its like."""
        with self._lock:
            now = [
                each
                for each in self._held
                if each.fault is Fault.SLOW and each.what == request.what
            ]
            self._held = [each for each in self._held if each not in now]
        for each in now:
            self._forward(each)

    def _forward(self, request: _Request) -> _Answer:
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                request.method, request.path, request.body or None, request.headers
            )
            answer = connection.getresponse()
            body = answer.read()
            headers = [
                each for each in answer.getheaders() if each[0].lower() not in _HOP
            ]
            return _Answer(answer.status, headers, body)


def _told(status: int) -> _Answer:
    body = json.dumps({"fault": {"code": status, "message": "by the proxy"}}).encode()
    headers = [("Content-Type", "application/json")]
    if status == 429:
        headers.append(("Retry-After", "1"))
    return _Answer(status, headers, body)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    proxy: Proxy


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        # The service makes its links from the Host that it is told: they lead here.
        headers = {
            key: value
            for key, value in self.headers.items()
            if key.lower() not in (*_HOP, "accept-encoding")
        }
        answer = self.server.proxy.handle(
            _Request(self.command, self.path, headers, body)
        )
        if answer is None:
            self.close_connection = True
            return
        # A client that gave up has gone.
        with contextlib.suppress(ConnectionError):
            self._send(answer)

    def _send(self, answer: _Answer) -> None:
        body = answer.body
        self.send_response_only(answer.status)
        for key, value in answer.headers:
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if answer.cut else body)
        self.close_connection = self.close_connection or answer.cut

    do_GET = do_POST = do_PUT = do_DELETE = _any

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: answers have passwords."""


@contextlib.contextmanager
def proxy_to(endpoint: str) -> Iterator[Proxy]:
    """One that listens on this host alone. :param endpoint: as the catalog has it."""
    parts = urllib.parse.urlsplit(endpoint)
    with _Server(("127.0.0.1", 0), _Handler) as server:
        path = f":{server.server_address[1]}{parts.path.rstrip('/')}"
        server.proxy = Proxy(parts.netloc, f"http://127.0.0.1{path}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.proxy
        finally:
            server.shutdown()
            thread.join()


__all__ = ["OF_CHANGES", "Fault", "Proxy", "proxy_to"]
