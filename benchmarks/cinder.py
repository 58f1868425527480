# SPDX-License-Identifier: Apache-2.0
"""Cases on a real Cinder, against the same REST calls made bare.

They need a cloud: the test bed's, brought up for the case unless the environment names
one that runs (``tools/testbed env``, or ``OS_CLOUD`` for a service user's login).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchHost, Result, interleaved, timed
from imagebackend import DiskManager, Flavor, Instance

ROOT = Path(__file__).parents[1]
_TYPE = "rbd1"
#: As the backend's own options have them.
_FIRST, _GROWS, _LONGEST = 0.1, 1.5, 2.0


@contextlib.contextmanager
def bed(folder: Path) -> Iterator[None]:
    """A cloud that answers, in the environment."""
    if "OS_CLIENT_CONFIG_FILE" in os.environ or "OS_CLOUD" in os.environ:
        yield
        return
    tool = [ROOT / "tools" / "testbed", "--folder", folder / "bed"]
    subprocess.run([*tool, "up", "cinder"], check=True)
    said = subprocess.run(
        [*tool, "env"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    for line in said.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        os.environ[name] = value.strip("'\"")
    try:
        yield
    finally:
        subprocess.run([*tool, "down", "--wipe"], check=True)


class BareCinder:
    """The requests that it takes, and nothing else."""

    def __init__(self, connection: Any, image: str) -> None:
        from keystoneauth1 import adapter, service_token, session

        auth = connection.session.auth
        wrapped = service_token.ServiceTokenAuthWrapper(auth, auth)
        self._api = adapter.Adapter(
            session.Session(auth=wrapped),
            service_type="block-storage",
            default_microversion="3.71",
        )
        self._image = image

    def create(self) -> tuple[str, str]:
        """POST volume, wait, POST attachment with the connector, complete."""
        made = self._api.post(
            "/volumes",
            json={"volume": {"size": 1, "volume_type": _TYPE, "imageRef": self._image}},
        ).json()["volume"]["id"]
        pause = _FIRST
        while True:
            time.sleep(pause)
            pause = min(_GROWS * pause, _LONGEST)
            if self._api.get(f"/volumes/{made}").json()["volume"]["status"] == (
                "available"
            ):
                break
        body = {
            "volume_uuid": made,
            "instance_uuid": str(uuid.uuid4()),
            "connector": {"host": "bench", "platform": "x86_64", "os_type": "linux"},
        }
        asked = self._api.post("/attachments", json={"attachment": body})
        attachment = asked.json()["attachment"]
        self._api.post(
            f"/attachments/{attachment['id']}/action", json={"os-complete": {}}
        )
        return made, attachment["id"]

    def remove(self, volume: str, attachment: str) -> None:
        self._api.delete(f"/attachments/{attachment}")
        self._api.delete(f"/volumes/{volume}")
        # Ours waits for that too; the next run is not to pay for it.
        while self._api.get(f"/volumes/{volume}", raise_exc=False).status_code == 200:
            time.sleep(_FIRST)


@contextlib.contextmanager
def counted(asked: list[str]) -> Iterator[None]:
    """Every request of this process to Cinder, but looks at one volume."""
    from requests.adapters import HTTPAdapter

    send: Callable[..., Any] = HTTPAdapter.send

    def counting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        path = request.path_url
        look = request.method == "GET" and path.startswith("/v3/volumes")
        if "/auth/tokens" not in path and not look:
            asked.append(f"{request.method} {path}")
        return send(self, request, *args, **kwargs)

    HTTPAdapter.send = counting  # type: ignore[method-assign]
    try:
        yield
    finally:
        HTTPAdapter.send = send  # type: ignore[method-assign]


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[tuple[BareCinder, BenchHost, str]]:
    import openstack

    with bed(folder):
        name = os.environ.get("OS_CLOUD", "testbed-service")
        connection = openstack.connect(cloud=name)
        image = connection.image.create_image(
            name="bench",
            data=os.urandom(16 << 20),
            disk_format="raw",
            visibility="public",
            wait=True,
        )
        login = connection.config.get_auth_args()
        auth = "auth_type = password\n" + "".join(
            f"{key} = {value}\n" for key, value in login.items()
        )
        host = BenchHost(
            folder / "host",
            "enabled_backends = cinder\n"
            f"[imagebackend_images]\nsource = glance\n[imagebackend_glance]\n{auth}"
            f"[cinder]\n{auth}default_type = {_TYPE}\n"
            f"ceph_conf = {os.environ.get('IMAGEBACKEND_TESTBED')}/ceph/ceph.conf\n",
        )
        try:
            yield BareCinder(connection, image.id), host, image.id
        finally:
            connection.image.delete_image(image.id)


def cinder_connected(folder: Path, runs: int) -> list[Result]:
    """From the call to a connected disk, by the manager and by the bare requests."""
    with prepared(folder) as (bare, host, image), host.manager() as manager:

        def new() -> Instance:
            flavor = Flavor("small", root_gb=1)
            return Instance(str(uuid.uuid4()), "project", image, flavor)

        def connect(manager: DiskManager, instance: Instance) -> None:
            manager.create(instance)
            manager.connect(instance.id)

        def ours() -> float:
            instance = new()
            seconds = timed(lambda: connect(manager, instance))
            manager.disconnect(instance.id)
            manager.destroy(instance.id)
            return seconds

        def theirs() -> float:
            made: list[tuple[str, str]] = []
            seconds = timed(lambda: made.append(bare.create()))
            bare.remove(*made[0])
            return seconds

        ours(), theirs()  # what is asked once only
        mine, least = interleaved(ours, theirs, runs)
        asked: list[list[str]] = [[] for _ in range(3)]
        for each in asked:
            instance = new()
            with counted(each):
                connect(manager, instance)
            manager.disconnect(instance.id)
            manager.destroy(instance.id)
    cinders = [[line for line in each if "/v3/" in line] for each in asked]
    floor = "POST volume, wait, POST attachment with its connector, complete"
    return [
        Result("cinder: create, connect", floor, mine, least, None),
        Result("cinder: more than bare", "the difference", mine - least, None, 0.060),
        Result(
            "cinder: requests",
            "besides looks at the volume: " + "; ".join(cinders[-1]),
            statistics.median(len(each) for each in cinders),
            None,
            6,
            "requests",
        ),
    ]


CASES = {"cinder-connected": cinder_connected}
