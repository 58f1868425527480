# SPDX-License-Identifier: Apache-2.0
"""From the operator's names to drivers, and what a bad driver cannot harm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stevedore import ExtensionManager

from imagebackend import exceptions as exc
from imagebackend.backends.loader import Backends, installed
from imagebackend.backends.qcow2 import Qcow2Backend
from imagebackend.backends.raw import RawBackend
from tests.conftest import HostUnderTest

Install = Callable[..., None]


@pytest.fixture
def backends(host: HostUnderTest) -> Backends:
    return Backends(host.conf, lambda: "0123456789ab")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Another project's package with a driver, as pip would leave it."""

    def do(driver: str, module: str, code: str, target: str = "Driver") -> None:
        root = tmp_path / f"site-{module}"
        info = root / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(
            f"[imagebackend.backends]\n{driver} = {module}:{target}\n"
        )
        (root / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(str(root))
        monkeypatch.setattr(ExtensionManager, "ENTRY_POINT_CACHE", {})
        monkeypatch.delitem(sys.modules, module, raising=False)

    return do


def test_several_backends_of_one_driver_are_apart(
    host: HostUnderTest, backends: Backends
) -> None:
    for name in ("fast", "slow"):
        with host.config_file.open("a") as file:
            file.write(f"[{name}]\ndriver = raw\ninstances_path = /srv/{name}\n")
    host.conf.reload_config_files()
    host.set("enabled_backends", ["fast", "slow", "qcow2"])
    fast, slow = backends.get("fast"), backends.get("slow")
    assert fast is not slow and isinstance(fast, RawBackend)
    assert (fast.options.instances_path, slow.options.instances_path) == (
        "/srv/fast",
        "/srv/slow",
    )
    assert isinstance(backends.get("qcow2"), Qcow2Backend)
    assert [each.name for each in backends] == ["fast", "slow", "qcow2"]
    assert backends.get("fast") is fast
    assert backends.driver_name("fast") == "raw"


def test_a_driver_that_does_not_exist_is_named_with_those_that_do(
    host: HostUnderTest, backends: Backends
) -> None:
    with host.config_file.open("a") as file:
        file.write("[gold]\ndriver = qcow3\n")
    host.conf.reload_config_files()
    host.set("enabled_backends", ["gold", "raw"])
    with pytest.raises(exc.ConfigError) as caught:
        backends.get("gold")
    for word in ("'gold'", "'qcow3'", "[gold] driver", "qcow2, raw"):
        assert word in caught.value.message
    assert backends.get("raw").name == "raw"


def test_a_backend_that_is_not_enabled_is_named_with_those_that_are(
    backends: Backends,
) -> None:
    with pytest.raises(exc.ConfigError, match=r"'cold' is not enabled.*qcow2, raw"):
        backends.get("cold")


@pytest.mark.parametrize(
    "name", ["DEFAULT", "imagebackend", "imagebackend_store", "a b", "", "x" * 41, "é"]
)
def test_a_backend_cannot_have_a_group_that_is_not_its_own(
    host: HostUnderTest, backends: Backends, name: str
) -> None:
    host.set("enabled_backends", ["raw", name])
    with pytest.raises(exc.ConfigError, match="enabled_backends has"):
        backends.get("raw")


def test_a_backend_that_is_named_twice_is_one(
    host: HostUnderTest, backends: Backends
) -> None:
    host.set("enabled_backends", ["raw", "qcow2", "raw"])
    assert backends.names == ["raw", "qcow2"]


@pytest.mark.parametrize(
    ("code", "kind", "wanted"),
    [
        ("import no_such_library", exc.MissingDependency, "no_such_library"),
        ("from os import nothing_such as Driver", exc.MissingDependency, "nothing"),
        ("class Other: pass", exc.HostError, "Driver"),
        ("this is no Python", exc.HostError, "SyntaxError"),
        ("raise RuntimeError('not today')", exc.HostError, "not today"),
        ("Driver = 7", exc.HostError, "not a class of backends"),
        ("class Driver: pass", exc.HostError, "not a class of backends"),
    ],
    ids=["library", "name", "attribute", "syntax", "raises", "number", "stranger"],
)
def test_a_driver_that_cannot_be_loaded_fails_alone(
    host: HostUnderTest,
    backends: Backends,
    install: Install,
    code: str,
    kind: type[exc.HostError],
    wanted: str,
) -> None:
    install("needy", "needy_driver", code)
    host.set("enabled_backends", ["cinder", "needy", "raw"])
    for _ in range(2):
        with pytest.raises(kind, match=wanted) as caught:
            backends.get("needy")
        assert "'needy'" in caught.value.message
    if kind is exc.MissingDependency:
        assert "install what it needs" in caught.value.message
    assert backends.get("raw").name == "raw"
    assert installed() == ["cinder", "needy", "qcow2", "raw", "rbd"]


def test_listing_the_drivers_imports_none(install: Install) -> None:
    install("needy", "needy_driver", "raise SystemExit(3)")
    assert "needy" in installed()
    assert "needy_driver" not in sys.modules


def test_two_packages_with_one_driver_are_not_told_apart_by_luck(
    host: HostUnderTest, backends: Backends, install: Install
) -> None:
    code = "from imagebackend.backends.raw import RawBackend as Driver"
    install("double", "one_driver", code)
    install("double", "other_driver", code)
    host.set("enabled_backends", ["double"])
    with pytest.raises(exc.ConfigError, match="several installed packages"):
        backends.get("double")


def test_another_projects_driver_is_as_good_as_ours(
    host: HostUnderTest, backends: Backends, install: Install
) -> None:
    code = (
        "from imagebackend.backends.raw import RawBackend\n"
        "from oslo_config import cfg\n"
        "class Driver(RawBackend):\n"
        "    VOLUME_TYPES = True\n"
        "    OPTIONS = [*RawBackend.OPTIONS, cfg.IntOpt('speed', default=3)]\n"
    )
    install("theirs", "their_driver", code)
    host.set("enabled_backends", ["theirs"])
    assert backends.get("theirs").options.speed == 3
    assert backends.driver("theirs").VOLUME_TYPES is True


def test_a_value_that_a_backends_option_cannot_have_is_refused(
    host: HostUnderTest, backends: Backends
) -> None:
    with host.config_file.open("a") as file:
        file.write("[raw]\npreallocate = perhaps\n")
    host.conf.reload_config_files()
    with pytest.raises(exc.ConfigError, match=r"\[raw\] preallocate"):
        backends.get("raw")


def test_no_backend_is_made_before_it_is_needed(host: HostUnderTest) -> None:
    asked: list[str] = []

    def deployment_id() -> str:
        asked.append("x")
        return "0123456789ab"

    backends = Backends(host.conf, deployment_id)
    assert backends.names == ["qcow2", "raw"] and not asked
    assert backends.driver("raw") is RawBackend and not asked
    assert backends.get("raw").deployment_id == "0123456789ab" and asked == ["x"]


def test_volume_types_are_found_beside_one_that_cannot_be_loaded(
    host: HostUnderTest, install: Install
) -> None:
    install("broken", "broken_driver", "import no_such_library")
    install(
        "typed",
        "typed_driver",
        "import dataclasses\n"
        "from imagebackend.backends.raw import RawBackend\n"
        "class Driver(RawBackend):\n"
        "    VOLUME_TYPES = True\n"
        "    def plan(self, want):\n"
        "        return super().plan(dataclasses.replace(want, volume_type=None))\n",
    )
    host.raw_image()
    instance = host.instance(imagebackend__volume_type="gold")
    host.set("enabled_backends", ["broken", "qcow2", "typed"])
    (root,) = host.manager().plan(instance).disks
    assert (root.placement.backend, root.why) == ("typed", "flavor 'small'")
    # Without it, the one that cannot be loaded might have had the type.
    host.set("enabled_backends", ["broken", "qcow2"])
    with pytest.raises(exc.MissingDependency, match="no_such_library"):
        host.manager().plan(instance)
    host.set("enabled_backends", ["qcow2"])
    with pytest.raises(exc.PlacementRefused, match="no backend of this host"):
        host.manager().plan(instance)
