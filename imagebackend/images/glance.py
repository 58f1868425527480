# SPDX-License-Identifier: Apache-2.0
"""Images of Glance.

Read as the caller where the caller's credentials are at hand, else as the service
user, who then looks whether the project may use the image. Everything that a storage
needs to know, and that tenants should not, is asked as the service user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import openstack.exceptions
import requests.exceptions
import urllib3.exceptions
from keystoneauth1 import exceptions as ks
from keystoneauth1.session import Session
from openstack.connection import Connection
from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend.conf import glance as options
from imagebackend.images.base import FORMATS, ImageSource, Readable
from imagebackend.keystone import caller_session, service_session
from imagebackend.model import (
    GiB,
    ImageInfo,
    MiB,
    Progress,
    ProgressCallback,
    UploadTarget,
)

LOG = log.getLogger(__name__)

_GROUP = options.GROUP.name
#: On an image that was made for a snapshot which is still being written: for which. An
#: image of the caller's gets no mark: when an upload breaks, Glance itself puts it back
#: as it was, and what we had changed meanwhile as well.
_UPLOAD = "imagebackend_upload"
#: What Glance says of every image; the rest are properties.
_FIELDS = frozenset(
    (
        *("checksum", "container_format", "created_at", "direct_url", "disk_format"),
        *("file", "id", "locations", "min_disk", "min_ram", "name", "os_hash_algo"),
        *("os_hash_value", "os_hidden", "owner", "protected", "schema", "self"),
        *("size", "status", "stores", "tags", "updated_at", "virtual_size"),
        *("visibility", "os_glance_importing_to_stores", "os_glance_failed_import"),
    )
)
_PATCH = "application/openstack-images-v2.1-json-patch"
_FIRST_LOOK, _LAST_LOOK = 0.2, 3.0
#: Seconds in which Glance ends what it is at.
_PATIENCE = 15.0
_CHUNK = MiB
_LOST = (
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,
    ks.ConnectFailure,
    ks.DiscoveryFailure,
    OSError,
)


class GlanceSource(ImageSource):
    """Glance, at the endpoint that Keystone's catalog names."""

    takes_locations = True

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        super().__init__(conf)
        self._lock = threading.Lock()
        self._made: tuple[Any, Session] | None = None

    # --- images --------------------------------------------------------------

    def get(
        self, image_id: str, *, auth: Any = None, project_id: str = ""
    ) -> ImageInfo:
        image = self._image(image_id, auth)
        if auth is None and project_id and not self._may_use(image, project_id):
            raise _not_found(image_id)
        return _info(image)

    def _image(self, image_id: str, auth: Any = None) -> dict[str, Any]:
        _check_id(image_id)
        answer = self._ask(
            self._client(auth), "get", f"/images/{image_id}", f"read image {image_id}"
        )
        if answer is None:
            raise _not_found(image_id)
        image: dict[str, Any] = answer.json()
        return image

    def _may_use(self, image: Mapping[str, Any], project_id: str) -> bool:
        """As Glance itself decides for a member of the project."""
        if image["visibility"] in ("public", "community"):
            return True
        if image["owner"] == project_id:
            return True
        if image["visibility"] != "shared":
            return False
        path = f"/images/{image['id']}/members/{project_id}"
        what = f"read who may use image {image['id']}"
        return self._ask(self._client(), "get", path, what) is not None

    @contextlib.contextmanager
    def open(self, info: ImageInfo, *, auth: Any = None) -> Iterator[Readable]:
        what = f"download image {info.id}"
        path = f"/images/{info.id}/file"
        answer = self._ask(self._client(auth), "get", path, what, stream=True)
        if answer is None:
            raise _not_found(info.id)
        with answer:
            if answer.status_code == 204:
                raise exc.ImageRejected(f"image {info.id} has no data", image=info.id)
            yield _Download(answer, what)

    def locations(
        self, info: ImageInfo, *, auth: Any = None, copy: bool = False
    ) -> Sequence[str]:
        found = self._locations(info.id)
        store = self.conf[_GROUP].copy_to_store
        # Only what lies there as a disk reads it can be cloned.
        raw = info.disk_format in ("raw", "iso")
        if copy and store and raw and self._copied(info.id, store):
            found = self._locations(info.id)
        return found

    def _locations(self, image_id: str) -> list[str]:
        """By the API for services; of an older Glance, as it tells everybody."""
        what = f"read the locations of image {image_id}"
        path = f"/images/{image_id}/locations"
        try:
            answer = self._ask(self._client(), "get", path, what)
        except exc.HostError as error:
            LOG.info("%s", error)
            answer = None
        if answer is not None:
            return [each["url"] for each in answer.json()]
        image = self._image(image_id)
        urls = [each["url"] for each in image.get("locations") or ()]
        direct = image.get("direct_url")
        return urls or ([direct] if direct else [])

    def _copied(self, image_id: str, store: str) -> bool:
        """Glance copies it into the store and is waited for. False: it was there."""

        def stores() -> tuple[list[str], Mapping[str, Any]]:
            image = self._image(image_id)
            return [each for each in image.get("stores", "").split(",") if each], image

        there, image = stores()
        if store in there:
            return False
        if store not in image.get("os_glance_importing_to_stores", ""):
            body = {
                "method": {"name": "copy-image"},
                "stores": [store],
                "all_stores_must_succeed": True,
            }
            what = f"copy image {image_id} to store {store}"
            path = f"/images/{image_id}/import"
            LOG.info("Glance is to %s", what)
            # Somebody else may have asked a moment ago.
            with contextlib.suppress(exc.Busy):
                self._ask(self._client(), "post", path, what, json=body)
        limit = self.conf[_GROUP].copy_timeout

        def done() -> bool:
            there, image = stores()
            if store in image.get("os_glance_failed_import", ""):
                raise exc.StorageError(
                    f"Glance could not copy image {image_id} to store {store}: its own "
                    f"log says why",
                    image=image_id,
                    store=store,
                )
            return store in there

        _wait(
            done,
            limit,
            f"image {image_id} is not in store {store} after {limit} s "
            f"([{_GROUP}] copy_timeout)",
        )
        return True

    def list(self) -> Iterator[ImageInfo]:
        path = "/images?limit=100"
        while path:
            answer = self._ask(self._client(), "get", path, "list images")
            page = answer.json() if answer is not None else {"images": []}
            for image in page["images"]:
                # One that cannot be a disk does not hide the others.
                with contextlib.suppress(exc.RequestError):
                    yield _info(image)
            path = page.get("next", "").removeprefix("/v2")

    def check(self) -> str:
        client = self._client()
        self._ask(client, "get", "/images?limit=1", "list images")
        return f"Glance at {client.get_endpoint()}"

    # --- snapshots ---------------------------------------------------------------

    def check_target(self, into: UploadTarget) -> None:
        _check_id(into.image)
        if into.disk_format not in FORMATS:
            raise exc.InvalidValue(
                "format of the image", into.disk_format, "one of " + ", ".join(FORMATS)
            )
        try:
            image = self._image(into.image)
        except exc.ImageNotFound:
            return
        if image["status"] != "queued":
            raise exc.Conflict(
                f"image {into.image} has data already (it is {image['status']}): give "
                f"an image that is queued, or an id that there is not yet",
                image=into.image,
                status=image["status"],
            )

    def put(
        self,
        into: UploadTarget,
        path: str,
        token: str,
        *,
        progress: ProgressCallback | None = None,
    ) -> ImageInfo:
        upload = _Upload(path, progress)

        def send() -> None:
            self._ask(
                self._client(),
                "put",
                f"/images/{into.image}/file",
                f"upload image {into.image}",
                data=upload,
                headers={"Content-Type": "application/octet-stream"},
            )

        def verify(image: Mapping[str, Any]) -> None:
            theirs = image.get("os_hash_value")
            if image.get("os_hash_algo") == upload.ALGORITHM and theirs:
                if theirs != upload.digest:
                    raise exc.IntegrityError(
                        f"image {into.image} has {upload.ALGORITHM} {theirs} in "
                        f"Glance, sent was {upload.digest}",
                        image=into.image,
                    )
            elif image.get("size") != len(upload):
                raise exc.IntegrityError(
                    f"image {into.image} has {image.get('size')} bytes in Glance, sent "
                    f"were {len(upload)}",
                    image=into.image,
                )

        return self._give(into, token, send, verify)

    def register(self, into: UploadTarget, location: str, token: str) -> ImageInfo:
        def send() -> None:
            what = f"give image {into.image} its data at {location}"
            path = f"/images/{into.image}/locations"
            body = {"url": location, "validation_data": {}}
            try:
                answer = self._ask(self._client(), "post", path, what, json=body)
            except exc.HostError as error:
                LOG.info("%s", error)
                answer = None
            if answer is None:  # an older Glance
                self._patch(
                    into.image,
                    [_add("locations/-", {"url": location, "metadata": {}})],
                    what,
                )

        def verify(_image: Mapping[str, Any]) -> None:
            # Glance reads the data for its digest by and by, and then writes the image
            # as it was when that began: a mark that is taken off too soon comes back,
            # as it may with data that takes longer. It does no harm there.
            with contextlib.suppress(exc.StorageUnavailable):
                _wait(
                    lambda: bool(self._image(into.image).get("os_hash_value")),
                    _PATIENCE,
                    "no digest",
                )

        return self._give(into, token, send, verify)

    def _give(
        self,
        into: UploadTarget,
        token: str,
        send: Callable[[], None],
        verify: Callable[[Mapping[str, Any]], None],
    ) -> ImageInfo:
        self.check_target(into)
        try:
            self._announce(into, token)
            send()
            limit = self.conf[_GROUP].copy_timeout

            def active() -> bool:
                status = self._status(into.image)
                if status in ("queued", "saving", "importing"):
                    return False
                if status != "active":
                    raise exc.StorageError(
                        f"image {into.image} is {status} after its upload",
                        image=into.image,
                    )
                return True

            _wait(active, limit, f"image {into.image} is not active after {limit} s")
            image = self._image(into.image)
            try:
                verify(image)
            except exc.IntegrityError:
                self._delete(into.image)
                raise
        except BaseException:
            with contextlib.suppress(exc.ImageBackendError):
                self.discard(into, token)
            raise
        self._unmark(image)
        return _info(self._image(into.image))

    def discard(self, into: UploadTarget, token: str) -> None:
        _check_id(into.image)
        try:
            image = self._image(into.image)
        except exc.ImageNotFound:
            return
        if image.get(_UPLOAD) == token:
            if image["status"] == "active":
                self._unmark(image)
            else:
                self._delete(into.image)

    def has(self, into: UploadTarget) -> bool:
        def decided() -> bool:
            return self._status(into.image) != "importing"

        try:
            _wait(decided, _PATIENCE, f"Glance is still at image {into.image}")
            return self._status(into.image) == "active"
        except exc.ImageNotFound:
            return False

    def _announce(self, into: UploadTarget, token: str) -> None:
        """The image is there, queued, and says who is about to fill it."""
        facts = {
            "disk_format": into.disk_format,
            "container_format": "bare",
            "min_disk": -(-into.min_disk // GiB),
        }
        what = f"make image {into.image}"
        try:
            present = self._image(into.image)
        except exc.ImageNotFound:
            body = {
                "id": into.image,
                "name": into.name or into.image,
                "visibility": "private",
                **facts,
                **into.properties,
                _UPLOAD: token,
            }
            if into.owner:
                body["owner"] = into.owner
            self._ask(self._client(), "post", "/images", what, json=body)
            return
        # What the one who made the image said of it stays.
        changes = {
            key: value
            for key, value in {**facts, **into.properties}.items()
            if not present.get(key)
        }
        declared = present.get("disk_format")
        if declared and declared != into.disk_format:
            raise exc.Conflict(
                f"image {into.image} is declared as {declared}, the snapshot is "
                f"{into.disk_format}",
                image=into.image,
            )
        if changes:
            self._patch(
                into.image, [_add(key, value) for key, value in changes.items()], what
            )

    def _delete(self, image_id: str) -> None:
        what = f"delete image {image_id}, which is not whole"
        self._ask(self._client(), "delete", f"/images/{image_id}", what)

    def _status(self, image_id: str) -> str:
        return str(self._image(image_id)["status"])

    def _unmark(self, image: Mapping[str, Any]) -> None:
        if _UPLOAD in image:
            change = {"op": "remove", "path": f"/{_UPLOAD}"}
            self._patch(image["id"], [change], f"finish image {image['id']}")

    def _patch(
        self, image_id: str, changes: Sequence[Mapping[str, Any]], what: str
    ) -> None:
        self._ask(
            self._client(),
            "patch",
            f"/images/{image_id}",
            what,
            json=changes,
            headers={"Content-Type": _PATCH},
        )

    # --- requests ------------------------------------------------------------------

    def _client(self, auth: Any = None) -> Any:
        """openstacksdk's adapter to the image service, as the caller or, without
        ``auth``, as the service user."""
        with self._lock:
            if self._made is None:
                session = self._session()
                self._made = (self._connect(session), session)
            client, session = self._made
        if auth is None:
            return client
        mine = caller_session(self.conf, _GROUP, auth, session)
        return self._connect(mine)

    def _session(self) -> Session:
        return service_session(self.conf, _GROUP, "the image source glance")

    def _connect(self, session: Session) -> Any:
        group = self.conf[_GROUP]
        # It asks Keystone's catalog, and Glance what versions it has.
        with self._errors("reach Glance"):
            return Connection(
                session=session,
                region_name=group.region_name,
                app_name="imagebackend",
                image_api_version="2",
                image_endpoint_override=group.endpoint_override,
                interface=group.valid_interfaces or "public",
            ).image

    def _ask(
        self, client: Any, method: str, path: str, what: str, **arguments: Any
    ) -> Any:
        """A request; None: what it is about is not there.

        :raises StorageUnavailable: no answer, or Glance is out of order.
        """
        arguments.setdefault("connect_retries", self.conf[_GROUP].connect_retries)
        try:
            with self._errors(what):
                answer = client.request(path, method.upper(), **arguments)
        except _NotFoundError:
            return None
        if answer.status_code == 404:
            return None
        if answer.status_code >= 400:
            raise self._refused(what, answer.status_code, _reason(answer))
        return answer

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """The library's errors, in our words."""
        try:
            yield
        except ks.NotFound as error:
            raise _NotFoundError from error
        except ks.HttpError as error:
            raise self._refused(what, error.http_status, str(error)) from error
        except (ks.ClientException, openstack.exceptions.SDKException) as error:
            if isinstance(error, _LOST):
                raise self._lost(what, error) from error
            raise exc.ConfigError(
                f"cannot {what}: {error}: is [{_GROUP}] right?", group=_GROUP
            ) from error
        except _LOST as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: BaseException) -> exc.StorageUnavailable:
        return exc.StorageUnavailable(f"cannot {what}: Glance does not answer: {error}")

    def _refused(self, what: str, status: int, reason: str) -> exc.ImageBackendError:
        text = f"cannot {what}: Glance answers {status}: {reason}"
        values = {"status": status}
        if status in (401, 403):
            return exc.ConfigError(
                f"{text}: may the user of [{_GROUP}], or the caller, do that?", **values
            )
        if status == 409:
            return exc.Busy(text, **values)
        if status == 413:
            return exc.StorageError(f"{text}: a quota of Glance is reached", **values)
        if status == 429 or status >= 500:
            return exc.StorageUnavailable(text, **values)
        return exc.StorageError(text, **values)


class _NotFoundError(Exception):
    """Within this module alone."""


class _Download:
    """An answer's body; what breaks it comes in our words."""

    def __init__(self, answer: Any, what: str) -> None:
        self._answer = answer
        self._what = what

    def read(self, size: int, /) -> bytes:
        try:
            data: bytes = self._answer.raw.read(size)
        except _LOST as error:
            raise exc.IntegrityError(
                f"cannot {self._what}: the connection broke: {error}"
            ) from error
        return data


class _Upload:
    """A file as a request's body. It may be sent again from its start, after a new
    token; the digest is of what was sent last."""

    ALGORITHM = "sha512"

    def __init__(self, path: str, progress: ProgressCallback | None) -> None:
        self._path = path
        self._size = os.stat(path).st_size
        self._progress = progress
        self.digest = ""

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[bytes]:
        hasher = hashlib.new(self.ALGORITHM)
        done = 0
        with open(self._path, "rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
                done += len(chunk)
                yield chunk
                if self._progress is not None:
                    self._progress(Progress("upload image", done, self._size))
        self.digest = hasher.hexdigest()


def _info(image: Mapping[str, Any]) -> ImageInfo:
    """:raises ImageRejected: it cannot become a disk."""
    image_id = image["id"]
    if image["status"] != "active":
        raise _rejected(image_id, f"it is {image['status']}, not active")
    if image["container_format"] not in ("bare", None):
        raise _rejected(
            image_id,
            f"its container_format is {image['container_format']}, which must be "
            f"unpacked first: upload it as bare",
        )
    properties = {
        key: str(value)
        for key, value in image.items()
        if key not in _FIELDS and value is not None
    }
    if "block_device_mapping" in properties and not image["size"]:
        raise _rejected(
            image_id,
            "it has no data, and only points to snapshots of volumes "
            "(block_device_mapping)",
        )
    format_ = image["disk_format"]
    if format_ not in FORMATS:
        raise _rejected(
            image_id,
            f"its disk_format is {format_}: there may be {', '.join(FORMATS)}",
        )
    size = image["size"]
    digest = None
    if image.get("os_hash_algo") and image.get("os_hash_value"):
        digest = f"{image['os_hash_algo']}:{image['os_hash_value']}"
    return ImageInfo(
        id=image_id,
        disk_format=format_,
        # The data of an image never changes, its id comes only once.
        version=digest or f"glance:{image_id}",
        name=image.get("name") or "",
        size=size,
        virtual_size=size if format_ in ("raw", "iso") else image.get("virtual_size"),
        digest=digest,
        min_disk_gb=image.get("min_disk") or 0,
        properties=properties,
        source="glance",
    )


def _rejected(image_id: str, why: str) -> exc.ImageRejected:
    return exc.ImageRejected(f"image {image_id} cannot be used: {why}", image=image_id)


def _not_found(image_id: str) -> exc.ImageNotFound:
    return exc.ImageNotFound(
        f"Glance has no image {image_id} that this project may use", image=image_id
    )


def _check_id(image_id: object) -> None:
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        if str(uuid.UUID(image_id)) == image_id:  # type: ignore[arg-type]
            return
    raise exc.InvalidValue(
        "image id", image_id, "a uuid in lower case with dashes, as Glance gives them"
    )


def _add(key: str, value: object) -> dict[str, object]:
    return {"op": "add", "path": f"/{key}", "value": value}


def _reason(answer: Any) -> str:
    """The sentence in Glance's page, without the page."""
    text = str(answer.text or answer.reason)
    if "<body>" in text:
        text = text.partition("<body>")[2].partition("</body>")[0]
        text = text.rpartition("<br />")[0] or text
        text = text.rpartition("</h1>")[2] or text
    return " ".join(text.split())[:300]


def _wait(done: Callable[[], bool], limit: float, late: str) -> None:
    end = time.monotonic() + limit
    pause = _FIRST_LOOK
    while not done():
        if time.monotonic() > end:
            raise exc.StorageUnavailable(late)
        time.sleep(pause)
        pause = min(pause * 1.5, _LAST_LOOK)
