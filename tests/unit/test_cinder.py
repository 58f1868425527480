# SPDX-License-Identifier: Apache-2.0
"""Cinder on its bad days: old, full, torn or lost answers, set up wrongly."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg

import imagebackend.conf
from imagebackend import exceptions as exc
from imagebackend.backends import cinder, cinder_volume
from imagebackend.backends.base import Blank
from imagebackend.backends.cinder_volume import CinderBackend
from imagebackend.model import (
    Connector,
    Creation,
    Generation,
    GiB,
    Handle,
    Role,
    Severity,
    Want,
    Way,
)
from tests.cinder_stub import (
    AUTH_PASSWORD,
    PASSWORD,
    PROJECT,
    TENANT,
    TENANT_PASSWORD,
    TENANT_PROJECT,
    Answer,
    CinderStub,
    fault,
)

VOLUME = "/volumes/[^/]+"
NOWHERE = "http://127.0.0.1:9/identity/v3"
Make = Callable[..., CinderBackend]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits here for a Cinder to recover."""
    monkeypatch.setattr(cinder, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(cinder, "_LAST_PAUSE", 0.002)
    monkeypatch.setattr(cinder_volume, "_PAUSE", 0.005)
    monkeypatch.setattr(cinder_volume, "_LOST_PAUSE", 0.005)


@pytest.fixture
def stub() -> Iterator[CinderStub]:
    with CinderStub() as stub:
        yield stub


@pytest.fixture
def make(stub: CinderStub, tmp_path: Path) -> Iterator[Make]:
    """Backends of the stub, with these options beside."""
    made: list[CinderBackend] = []

    def make(**options: object) -> CinderBackend:
        section = {
            **stub.options,
            "poll_first": 0.01,
            "poll_longest": 0.02,
            **options,
        }
        lines = [f"{key} = {value}" for key, value in section.items()]
        file = tmp_path / f"{len(made)}.conf"
        file.write_text(
            "\n".join(
                ["[imagebackend]", f"state_path = {tmp_path}", "[cinder]", *lines, ""]
            )
        )
        conf = cfg.ConfigOpts()
        imagebackend.conf.register(conf)
        conf(["--config-file", str(file)], project="imagebackend")
        conf.register_opts(list(CinderBackend.OPTIONS), "cinder")
        made.append(CinderBackend("cinder", conf, "d" * 12))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def backend(make: Make) -> CinderBackend:
    return make()


def want(**asked: Any) -> Want:
    return Want(
        **{
            "size": GiB,
            "role": Role.ROOT,
            "instance_id": str(uuid.uuid4()),
            "project_id": TENANT_PROJECT,
            **asked,
        }
    )


def generation(
    backend: CinderBackend, wanted: Want | None = None, handle: Handle | None = None
) -> Generation:
    """As if planned, without asking Cinder for its types."""
    wanted = wanted or want()
    return Generation(
        str(uuid.uuid4()),
        str(uuid.uuid4()),
        "root",
        wanted.instance_id,
        backend.deployment_id,
        wanted.project_id,
        backend.name,
        backend._scope(backend._owner(wanted.project_id)),
        wanted.size,
        "raw",
        handle=handle or {},
    )


def planned(backend: CinderBackend, **asked: Any) -> Generation:
    wanted = want(**asked)
    return generation(backend, wanted, backend.plan(wanted).handle)


def kept(_handle: Handle) -> None:
    """As the store does, which forgets nothing."""


def created(backend: CinderBackend, gen: Generation) -> Generation:
    made: Creation = backend.create(gen, Blank(), kept)
    return dataclasses.replace(gen, handle=made.handle)


HOST = Connector("host-id", "compute-1")


# --- who asks, and how ------------------------------------------------------------


def test_every_request_carries_the_service_token(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gen = created(backend, planned(backend))
    backend.stat(gen)
    backend.delete(gen)
    assert {each.method for each in stub.requests} == {"GET", "POST", "DELETE"}
    for each in stub.requests:
        assert each.headers["X-Service-Token"] in stub.tokens, each.path
        assert each.headers["X-Auth-Token"] in stub.tokens, each.path
    assert not stub.volumes


def test_a_callers_request_carries_the_callers_token_and_the_services(
    stub: CinderStub, make: Make
) -> None:
    from keystoneauth1.identity import v3

    backend = make(owner="tenant")
    auth = v3.Password(
        stub.options["auth_url"],
        username=TENANT,
        password=TENANT_PASSWORD,
        user_domain_name="Default",
        project_name="theirs",
        project_domain_name="Default",
    )
    gen = planned(backend)
    backend.create(gen, Blank(), kept, auth=auth)
    (request,) = stub.sent("POST", "/volumes")
    assert stub.tokens[request.headers["X-Auth-Token"]] == TENANT_PROJECT
    assert stub.tokens[request.headers["X-Service-Token"]] == PROJECT
    (volume,) = stub.volumes.values()
    assert volume["os-vol-tenant-attr:tenant_id"] == TENANT_PROJECT


def test_a_token_that_has_expired_is_replaced(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gen = created(backend, generation(backend))
    stub.tokens.clear()
    assert backend.stat(gen) is not None
    backend.delete(gen)
    assert not stub.volumes


@pytest.mark.parametrize(
    ("theirs", "spoken"),
    [("3.44", (3, 44)), ("3.59", (3, 59)), ("3.71", (3, 71)), ("3.99", (3, 71))],
)
def test_the_newest_version_that_both_know_is_spoken(
    stub: CinderStub, backend: CinderBackend, theirs: str, spoken: tuple[int, int]
) -> None:
    stub.max_version = theirs
    assert backend._cinder.version == spoken
    created(backend, generation(backend))
    told = {each.headers["OpenStack-API-Version"] for each in stub.requests}
    assert told == {f"volume {spoken[0]}.{spoken[1]}"}


def test_an_old_cinder_is_refused_naming_both_versions(
    stub: CinderStub, backend: CinderBackend
) -> None:
    stub.max_version = "3.43"
    with pytest.raises(exc.ConfigError, match=r"'cinder'.*3\.43.*3\.44"):
        backend.plan(want())
    assert not stub.requests
    (finding,) = backend.check()
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(("theirs", "mode"), [("3.53", None), ("3.54", "rw")])
def test_what_an_older_cinder_does_not_know_is_not_sent(
    stub: CinderStub, make: Make, theirs: str, mode: str | None
) -> None:
    stub.max_version = theirs
    backend = make()
    created(backend, generation(backend))
    sent = [each.body["attachment"] for each in stub.sent("POST", "/attachments")]
    assert [each.get("mode") for each in sent] == [mode]


@pytest.mark.parametrize(
    ("theirs", "force"), [("3.44", True), ("3.65", True), ("3.66", None)]
)
def test_a_snapshot_is_forced_only_where_that_is_known(
    stub: CinderStub, make: Make, theirs: str, force: bool | None
) -> None:
    stub.max_version = theirs
    backend = make()
    gen = created(backend, generation(backend))
    backend.snapshot(gen, "snap", kept)
    (request,) = stub.sent("POST", "/snapshots")
    assert request.body["snapshot"].get("force") == force


# --- answers that do not come, or torn ---------------------------------------------


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_what_may_be_asked_again_is_asked_again(
    stub: CinderStub, backend: CinderBackend, method: str, status: int
) -> None:
    gen = created(backend, generation(backend))
    stub.program(method, VOLUME, Answer(status), times=2)
    backend.delete(gen)
    assert not stub.volumes


def test_what_is_asked_again_ends_with_the_reason(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gen = created(backend, generation(backend))
    before = len(stub.requests)
    stub.program("GET", VOLUME, Answer(503, fault(503, "the database is away")), 99)
    with pytest.raises(exc.StorageUnavailable, match="503: the database is away"):
        backend.stat(gen)
    assert len(stub.requests) == before + 3


def test_a_wait_survives_a_cinder_that_restarts(
    stub: CinderStub, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(connect_retries=0)
    stub.creation = 0.05
    stub.program("GET", VOLUME, Answer(503), times=3)
    created(backend, generation(backend))
    assert len(stub.volumes) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", VOLUME), ("POST", "/volumes"), ("POST", "/attachments")],
)
def test_a_cinder_that_is_too_busy_says_when_to_ask_again(
    stub: CinderStub,
    backend: CinderBackend,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
) -> None:
    slept: list[float] = []
    gen = generation(backend)
    monkeypatch.setattr("keystoneauth1.session.time.sleep", slept.append)
    stub.program(
        method, path, Answer(429, fault(429, "slower"), {"Retry-After": "7"}), times=2
    )
    created(backend, gen)
    assert [each for each in slept if each >= 1] == [7, 7]
    # It had not begun: nothing is lost, and nothing there twice.
    assert len(stub.volumes) == len(stub.attachments) == 1


def test_nobody_waits_for_hours_because_a_proxy_says_so(
    stub: CinderStub, backend: CinderBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    gen = created(backend, generation(backend))
    monkeypatch.setattr("keystoneauth1.session.time.sleep", slept.append)
    busy = Answer(429, fault(429, "slower"), {"Retry-After": "86400"})
    stub.program("GET", VOLUME, busy, times=99)
    with pytest.raises(exc.StorageUnavailable, match="429"):
        backend.stat(gen)
    assert all(each <= 60 for each in slept)


@pytest.mark.parametrize(
    "torn",
    [
        Answer(200, b'{"volume": {"id": "5f'),
        Answer(200, b""),
        Answer(200, b"<html>welcome</html>"),
        Answer(200, b"[]"),
        Answer(200, b"null"),
        Answer(200, b'{"volume": null}'),
        Answer(cut=True),
        Answer(lost="after"),
        Answer(500, b"<html>"),
        Answer(503, b'{"computeFault": '),
        Answer(500, b'{"computeFault": "text"}'),
        Answer(500, b'["text"]'),
    ],
    ids=lambda each: str(each.status and each.body) + each.lost,
)
def test_a_torn_answer_says_nothing(
    stub: CinderStub, backend: CinderBackend, torn: Answer
) -> None:
    gen = created(backend, generation(backend))
    stub.program("GET", VOLUME, torn, times=99)
    with pytest.raises(exc.StorageUnavailable, match="backend 'cinder': cannot read"):
        backend.stat(gen)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(404, b"<html><h1>404 Not Found</h1></html>"),
        Answer(404, b""),
        Answer(404, b'{"itemNotFound": '),
        Answer(
            404,
            {
                "message": "The resource could not be found.<br /><br />\n\n\n",
                "code": "404 Not Found",
                "title": "Not Found",
            },
        ),
    ],
    ids=["page", "nothing", "torn", "router"],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_only_cinder_itself_says_that_a_volume_is_gone(
    stub: CinderStub, backend: CinderBackend, answer: Answer, method: str
) -> None:
    # A proxy between two restarts, or a wrong path: the volume is there.
    gen = created(backend, generation(backend))
    stub.program(method, VOLUME, answer, times=99)
    with pytest.raises(exc.StorageUnavailable, match="404"):
        backend.delete(gen)
    assert len(stub.volumes) == 1


def test_a_keystone_without_its_page_does_not_say_that_a_volume_is_gone(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gen = created(backend, generation(backend))
    stub.tokens.clear()
    stub.program("POST", "/identity/v3/auth/tokens", Answer(404), times=99)
    with pytest.raises(exc.StorageUnavailable, match="Keystone answers 404"):
        backend.delete(gen)
    assert len(stub.volumes) == 1


# --- nothing is made twice ---------------------------------------------------------


LOST = [
    Answer(lost="before"),
    Answer(lost="after"),
    Answer(cut=True),
    Answer(502, b"<html>"),
    Answer(504, fault(504, "too slow")),
]
LOST_IDS = ["before", "after", "cut", "502", "504"]


@pytest.mark.parametrize("lost", LOST, ids=LOST_IDS)
def test_a_volume_whose_answer_was_lost_is_there_once(
    stub: CinderStub, backend: CinderBackend, lost: Answer
) -> None:
    stub.program("POST", "/volumes", lost)
    gen = created(backend, generation(backend))
    assert list(stub.volumes) == [gen.handle["volume"]]
    done = lost.lost == "after" or lost.cut
    assert len(stub.sent("POST", "/volumes")) == (1 if done else 2)


def test_a_first_request_that_was_still_running_leaves_no_twin(
    stub: CinderStub, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked, no answer, not there yet, asked again: then there are two."""
    backend = make()
    stub.creation = 0.3
    stub.program("POST", "/volumes", Answer(lost="during", delay=0.1))
    gen = created(backend, generation(backend))
    assert len(stub.sent("POST", "/volumes")) == 2
    stub.settle()
    assert list(stub.volumes) == [gen.handle["volume"]]
    assert backend.drop_twins(gen, []) == 0


def test_a_first_request_that_ends_late_is_found_by_recovery(
    stub: CinderStub, backend: CinderBackend
) -> None:
    stub.program("POST", "/volumes", Answer(lost="during", delay=0.5))
    gen = created(backend, generation(backend))
    stub.settle()
    assert len(stub.volumes) == 2
    assert backend.drop_twins(gen, []) == 1
    assert list(stub.volumes) == [gen.handle["volume"]]


def test_a_volume_that_never_comes_leaves_nothing(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gen = generation(backend)
    stub.program("POST", "/volumes", Answer(lost="before"), times=99)
    with pytest.raises(exc.StorageUnavailable, match="create a volume"):
        backend.create(gen, Blank(), kept)
    assert not stub.volumes
    assert len(stub.sent("POST", "/volumes")) == cinder_volume._TRIES


def test_a_create_that_died_after_its_request_finds_its_volume(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gen = generation(backend)
    handles: list[Handle] = []

    def dies(handle: Handle) -> None:
        handles.append(handle)
        if "volume" in handle:
            raise KeyboardInterrupt

    # Nothing is undone by a process that is gone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_remove_made", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            backend.create(gen, Blank(), dies)
    (there,) = stub.volumes
    again = dataclasses.replace(gen, handle=handles[0])
    assert created(backend, again).handle["volume"] == there
    assert list(stub.volumes) == [there]


@pytest.mark.parametrize("lost", LOST, ids=LOST_IDS)
def test_a_reservation_whose_answer_was_lost_is_there_once(
    stub: CinderStub, backend: CinderBackend, lost: Answer
) -> None:
    stub.program("POST", "/attachments", lost)
    gen = created(backend, generation(backend))
    (attachment,) = stub.attachments.values()
    assert attachment["volume_id"] == gen.handle["volume"]
    assert attachment["status"] == "reserved"


@pytest.mark.parametrize("lost", LOST, ids=LOST_IDS)
def test_an_attachment_whose_answer_was_lost_is_there_once(
    stub: CinderStub, backend: CinderBackend, lost: Answer
) -> None:
    gen = created(backend, generation(backend))
    volume = stub.volumes[gen.handle["volume"]]
    stub.program("POST", "/attachments", lost)
    backend._attach(backend._volume(gen), gen, {"host": "compute-1"})
    hosts = [each["_host"] for each in stub.attachments.values() if each["_host"]]
    assert hosts == ["compute-1"]
    assert len(volume["attachments"]) == 1


def test_a_snapshot_whose_answer_was_lost_is_there_once(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gen = created(backend, generation(backend))
    stub.program("POST", "/snapshots", Answer(lost="after"))
    snapshot = backend.snapshot(gen, "snap", kept)
    assert list(stub.snapshots) == [snapshot.handle["snapshot"]]


def test_a_volume_that_ended_in_an_error_is_made_once_more(
    stub: CinderStub, backend: CinderBackend
) -> None:
    stub.failing = 1
    gen = created(backend, generation(backend))
    assert list(stub.volumes) == [gen.handle["volume"]]
    assert len(stub.sent("POST", "/volumes")) == 2


def test_the_reason_is_what_cinder_tells_users(
    stub: CinderStub, backend: CinderBackend
) -> None:
    stub.failing = 2
    with pytest.raises(exc.StorageError, match=r"No room in any pool\."):
        created(backend, generation(backend))
    assert not stub.volumes


def test_a_volume_that_others_have_marked_is_not_touched(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gen = generation(backend)
    foreign = stub.add_volume(metadata={"imagebackend_generation": gen.id})
    tenants = stub.add_volume(
        TENANT_PROJECT,
        metadata={
            "imagebackend_generation": gen.id,
            "imagebackend_deployment": gen.deployment_id,
        },
    )
    made = created(backend, gen)
    backend.delete(made)
    assert set(stub.volumes) == {foreign["id"], tenants["id"]}


# --- refusals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, exc.StorageError),
        (401, exc.ConfigError),
        (403, exc.ConfigError),
        (404, exc.ObjectMissing),
        (409, exc.Busy),
        (413, exc.StorageFull),
        (429, exc.StorageUnavailable),
        (500, exc.StorageUnavailable),
        (503, exc.StorageUnavailable),
    ],
)
def test_each_refusal_says_who_can_act(
    stub: CinderStub,
    make: Make,
    status: int,
    kind: type[exc.ImageBackendError],
) -> None:
    backend = make(connect_retries=0)
    gen = generation(backend)
    stub.program("POST", "/volumes", Answer(status, fault(status, "its reason")), 99)
    with pytest.raises(kind, match=f"Cinder answers {status}: its reason") as caught:
        backend.create(gen, Blank(), kept)
    assert type(caught.value) is kind
    assert caught.value.message.startswith(
        f"backend 'cinder': cannot create a volume for generation {gen.id}: "
    )
    assert caught.value.values["status"] == status
    if kind is exc.ConfigError:
        assert "[cinder]" in caught.value.message
    assert not stub.volumes


def test_a_full_quota_is_cinders_own_word(
    stub: CinderStub, backend: CinderBackend
) -> None:
    stub.quota = 0
    with pytest.raises(exc.StorageFull, match="VolumeLimitExceeded"):
        created(backend, generation(backend))


def test_without_keystone_the_message_says_whom_to_look_for(
    stub: CinderStub, make: Make
) -> None:
    backend = make(auth_url=NOWHERE)
    with pytest.raises(exc.StorageUnavailable, match="Keystone") as caught:
        backend.plan(want())
    assert "[cinder] auth_url" in caught.value.message
    assert "127.0.0.1:9" in caught.value.message


@pytest.mark.parametrize("status", [500, 503])
def test_a_keystone_that_fails_may_answer_later(
    stub: CinderStub, backend: CinderBackend, status: int
) -> None:
    stub.program("POST", "/identity/v3/auth/tokens", Answer(status), times=1)
    with pytest.raises(exc.StorageUnavailable, match=f"Keystone answers {status}"):
        backend.plan(want())
    assert backend.plan(want()).format == "raw"


def test_a_wrong_password_names_the_options_and_not_the_password(
    stub: CinderStub, make: Make
) -> None:
    backend = make(password="wrong-1d4c-word")
    with pytest.raises(exc.ConfigError, match="Keystone answers 401") as caught:
        backend.plan(want())
    assert re.search(r"\[cinder\].*username.*password", caught.value.message)
    assert "wrong-1d4c-word" not in repr(caught.value.__dict__) + str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{}, {"region_name": "elsewhere"}, {"valid_interfaces": "admin"}],
    ids=["nothing", "region", "interface"],
)
def test_a_catalog_without_cinder_names_what_was_looked_for(
    stub: CinderStub, make: Make, options: dict[str, str]
) -> None:
    stub.catalog = bool(options)
    backend = make(**options)
    with pytest.raises(exc.ConfigError, match="catalog") as caught:
        backend.plan(want())
    assert "[cinder] region_name" in caught.value.message
    for value in options.values():
        assert value in caught.value.message


@pytest.mark.parametrize(
    "answer",
    [Answer(503), Answer(lost="before"), Answer(200, b'{"versions": ['), Answer(404)],
    ids=["503", "lost", "torn", "404"],
)
def test_a_cinder_that_is_down_at_the_start_is_not_a_wrong_catalog(
    stub: CinderStub, backend: CinderBackend, answer: Answer
) -> None:
    stub.program("GET", "/volume.*", answer, times=99)
    with pytest.raises(exc.StorageUnavailable, match="Cinder") as caught:
        backend.plan(want())
    assert "Keystone answers" not in caught.value.message
    assert stub.url in caught.value.message
    stub._programs.clear()
    assert backend.plan(want()).format == "raw"


def test_without_a_user_the_message_says_which_options_are_missing(
    stub: CinderStub, make: Make
) -> None:
    backend = make(auth_type="")
    with pytest.raises(exc.ConfigError, match=r"\[cinder\] auth_type is not set"):
        backend.plan(want())


# --- secrets -----------------------------------------------------------------------


def test_no_secret_is_in_a_log_or_an_exception(
    stub: CinderStub, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    levels = {}
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        if logger.level and name != cinder._BODIES.name:
            levels[name] = logger.level
            logger.setLevel(logging.DEBUG)
    # This host cannot use what it is told; and no os-brick is needed to know.
    capabilities = {"storage_protocol": "ceph"}
    stub.pools.append({"name": "pool", "capabilities": capabilities})
    stub.connection_info |= {"driver_volume_type": "rbd", "encrypted": True}
    errors: list[BaseException | None] = []
    try:
        backend = make(connect_retries=0)
        gen = created(backend, planned(backend))
        with pytest.raises(exc.ImageBackendError) as caught:
            backend.connect(gen, HOST, kept)
        errors.append(caught.value)
        attached = backend._attach(backend._volume(gen), gen, {"host": "compute-1"})
        assert attached["connection_info"]["auth_password"] == AUTH_PASSWORD
        for answer in (Answer(409), Answer(cut=True), Answer(200, b"{"), Answer(401)):
            # After a 401 it logs in anew, and asks once more.
            stub.program("GET", "/attachments/.*", answer, times=2)
            with pytest.raises(exc.ImageBackendError) as caught:
                backend._cinder.attachment(attached["id"])
            errors.append(caught.value)
            stub._programs.clear()
        stub.users.clear()
        with pytest.raises(exc.ImageBackendError) as caught:
            make(connect_retries=0).plan(want())
        errors.append(caught.value)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    text = caplog.text + "".join(
        f"{record.msg!r} {record.args!r} {record.getMessage()}"
        for record in caplog.records
    )
    for error in errors:
        while error is not None:
            text += f"{error!r} {error} {getattr(error, 'values', '')}"
            error = error.__cause__ or error.__context__
    assert "create a volume for generation" in text
    for secret in (PASSWORD, AUTH_PASSWORD, *stub.tokens):
        assert secret not in text


# --- types, sizes, options ---------------------------------------------------------


def test_a_private_type_is_for_those_who_were_given_it(
    stub: CinderStub, backend: CinderBackend
) -> None:
    type_id = stub.add_type("gold", public=False)
    with pytest.raises(exc.PlacementRefused, match="'gold'") as caught:
        backend.plan(want(volume_type="gold"))
    assert caught.value.values["accepted"] == ["plain"]
    assert backend.volume_types(TENANT_PROJECT) == ["plain"]
    stub.access[type_id] = [TENANT_PROJECT]
    assert backend.plan(want(volume_type="gold")).handle["type"] == type_id
    assert backend.plan(want(volume_type=type_id)).handle["type"] == type_id
    assert backend.volume_types(TENANT_PROJECT) == ["plain", "gold"]
    # The service's own access is not the caller's.
    stub.access[type_id] = [PROJECT]
    with pytest.raises(exc.PlacementRefused):
        backend.plan(want(volume_type="gold"))
    with pytest.raises(exc.PlacementRefused):
        backend.plan(want(volume_type="gold", project_id=""))


def test_the_operators_own_default_may_be_private(stub: CinderStub, make: Make) -> None:
    type_id = stub.add_type("gold", public=False)
    backend = make(default_type="gold")
    assert backend.plan(want()).handle["type"] == type_id
    with pytest.raises(exc.PlacementRefused):
        make(default_type="gold", owner="tenant").plan(want())


def test_an_unknown_type_lists_what_may_be_used(
    stub: CinderStub, backend: CinderBackend
) -> None:
    stub.add_type("silver")
    stub.add_type("gold", public=False)
    with pytest.raises(
        exc.PlacementRefused, match=r"'tin'.*it may use plain, silver$"
    ) as caught:
        backend.plan(want(volume_type="tin"))
    assert caught.value.values["accepted"] == ["plain", "silver"]


def test_without_a_type_it_is_cinders_default(
    stub: CinderStub, backend: CinderBackend
) -> None:
    stub.default_type = stub.add_type("silver")
    assert backend.plan(want()).handle["type_name"] == "silver"
    created(backend, planned(backend))
    (request,) = stub.sent("POST", "/volumes")
    assert request.body["volume"]["volume_type"] == stub.default_type


@pytest.mark.parametrize(
    ("limit", "size", "refused"),
    [
        ("min", 1 * GiB, True),
        ("min", 2 * GiB, True),
        ("min", 2 * GiB + 1, False),
        ("min", 3 * GiB, False),
        ("max", 3 * GiB, False),
        ("max", 3 * GiB + 1, True),
    ],
)
def test_the_sizes_of_a_type_are_kept(
    stub: CinderStub, backend: CinderBackend, limit: str, size: int, refused: bool
) -> None:
    specs: Any = {f"provisioning__{limit}_vol_size": "3"}
    stub.add_type("gold", **specs)
    wanted = want(volume_type="gold", size=size)
    if not refused:
        assert backend.plan(wanted).size == 3 * GiB
        return
    with pytest.raises(exc.SizeRefused, match=f"'gold'.* 3 .*{limit}_vol_size"):
        backend.plan(wanted)
    assert not stub.sent("POST", ".*")


@pytest.mark.parametrize("limit", ["", "lots"])
def test_a_limit_that_is_no_number_is_none(
    stub: CinderStub, backend: CinderBackend, limit: str
) -> None:
    stub.add_type("gold", provisioning__max_vol_size=limit)
    assert backend.plan(want(volume_type="gold")).size == GiB


@pytest.mark.parametrize(
    ("option", "asked", "sent"),
    [
        (None, "zone-1", None),
        ("instance", "zone-1", "zone-1"),
        ("other", None, "other"),
    ],
)
def test_the_zone_reaches_the_request(
    stub: CinderStub,
    make: Make,
    option: str | None,
    asked: str | None,
    sent: str | None,
) -> None:
    backend = make(**({"availability_zone": option} if option else {}))
    created(backend, planned(backend, availability_zone=asked))
    (request,) = stub.sent("POST", "/volumes")
    assert request.body["volume"].get("availability_zone") == sent


def test_hints_reach_the_request(stub: CinderStub, make: Make) -> None:
    backend = make(scheduler_hints="local_to_instance:{instance},tenant:{project}")
    gen = created(backend, generation(backend))
    (request,) = stub.sent("POST", "/volumes")
    assert request.body["OS-SCH-HNT:scheduler_hints"] == {
        "local_to_instance": gen.instance_id,
        "tenant": TENANT_PROJECT,
    }


def test_without_hints_none_are_sent(stub: CinderStub, backend: CinderBackend) -> None:
    created(backend, generation(backend))
    (request,) = stub.sent("POST", "/volumes")
    assert set(request.body) == {"volume"}


def test_a_type_that_cannot_grow_attached_says_so(
    stub: CinderStub, backend: CinderBackend
) -> None:
    stub.add_type("gold", volume_backend_name="fast")
    stub.add_type("silver", volume_backend_name="slow")
    for name, grows in (("fast", False), ("slow", True)):
        capabilities = {
            "volume_backend_name": name,
            "storage_protocol": ["iSCSI", "iscsi"],
            "online_extend_support": grows,
        }
        stub.pools.append({"name": name, "capabilities": capabilities})
    ways = [
        backend.capabilities(backend.plan(want(volume_type=name))).live_resize
        for name in ("gold", "silver")
    ]
    assert ways == [Way.NONE, Way.STORAGE]


# --- many at once, and none --------------------------------------------------------


def test_many_volumes_are_waited_for_by_one_list(
    stub: CinderStub, backend: CinderBackend
) -> None:
    gens = [generation(backend) for _ in range(12)]
    stub.creation = 0.3
    threads = [
        threading.Thread(target=created, args=(backend, each), daemon=True)
        for each in gens
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert len(stub.volumes) == 12
    lists = stub.sent("GET", "/volumes/detail")
    assert lists
    # All have what is told apart from other hosts' and other deployments' volumes.
    for request in lists:
        assert re.search(
            "imagebackend_deployment.*imagebackend_host", str(request.query)
        )


def test_a_backend_that_was_not_used_closes_without_a_request(
    stub: CinderStub, backend: CinderBackend
) -> None:
    backend.close()
    backend._cinder.close()
    backend.close()
    assert not stub.requests
    assert not stub.logins


def test_a_closed_backend_connects_again(
    stub: CinderStub, backend: CinderBackend
) -> None:
    backend.plan(want())
    backend.close()
    assert backend.plan(want()).format == "raw"
    assert len(stub.tokens) == 2
