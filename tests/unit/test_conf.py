# SPDX-License-Identifier: Apache-2.0
"""Options, drivers by name, and the check of a host."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from stevedore import ExtensionManager

import imagebackend
import imagebackend.conf
from imagebackend import exceptions as exc
from imagebackend.model import Severity
from tests.conftest import HostUnderTest

ROOT = Path(imagebackend.__file__).parent


def test_every_option_is_read_somewhere_and_says_what_it_does() -> None:
    read: set[str] = set()
    for path in ROOT.rglob("*.py"):
        if path.parent.name == "conf":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    # qemu-img's limits are two sets, told apart by a prefix.
    read |= {f"copy_{name}" for name in ("cpu_seconds", "timeout")}
    read |= {"cpu_seconds"}
    for group, options in imagebackend.conf.list_opts():
        for option in options:
            assert option.name in read, f"[{group.name}] {option.name}"
            assert option.help and option.help.endswith("."), option.name


def test_the_sample_file_has_every_option(tmp_path: Path) -> None:
    sample = tmp_path / "sample"
    subprocess.run(
        [
            *(Path(sys.executable).with_name("oslo-config-generator"), "--config-file"),
            ROOT.parent / "etc/oslo-config-generator/imagebackend.conf",
            *("--output-file", sample),
        ],
        check=True,
        cwd=tmp_path,
    )
    text = sample.read_text()
    for group, options in imagebackend.conf.list_opts():
        assert f"[{group.name}]" in text
        assert all(f"#{option.name} =" in text for option in options)


def test_two_configurations_in_one_process_are_two(make_host: object) -> None:
    assert callable(make_host)
    one, two = make_host("one"), make_host("two")
    one.set("max_disk_gb", 7)
    assert two.conf.imagebackend.max_disk_gb != 7
    imagebackend.conf.register(one.conf)  # again: no harm
    assert one.conf.imagebackend.max_disk_gb == 7


@pytest.mark.parametrize(
    ("group", "line"),
    [
        ("imagebackend", "max_disk_gb = lots"),
        ("imagebackend", "slow_path = walk"),
        ("imagebackend_images", "cache_format = best"),
        ("imagebackend_qemu_img", "memory_mb = 1"),
    ],
)
def test_a_value_that_cannot_be_is_refused_at_the_start(
    host: HostUnderTest, group: str, line: str
) -> None:
    with host.config_file.open("a") as file:
        file.write(f"[{group}]\n{line}\n")
    host.conf.reload_config_files()
    host.conf(["--config-file", str(host.config_file)], project="imagebackend")
    with pytest.raises(exc.ConfigError) as caught:
        host.manager()
    assert line.partition(" ")[0] in caught.value.message
    assert "LocationInfo" not in caught.value.message


# --- drivers ------------------------------------------------------------------------


def test_a_driver_that_is_not_there_is_named_with_those_that_are(
    host: HostUnderTest,
) -> None:
    host.set("enabled_backends", ["qcow3", "raw"])
    with pytest.raises(exc.ConfigError, match=r"'qcow3'.*qcow2, raw"):
        host.manager().create(host.instance(None))
    host.set("enabled_backends", [])
    with pytest.raises(exc.ConfigError, match="enabled_backends is empty"):
        host.manager().create(host.instance(None))


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is installed whose library is not."""
    info = tmp_path / "package" / "needy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: needy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[imagebackend.backends]\nneedy = needy_driver:Driver\n"
    )
    (info.parent / "needy_driver.py").write_text("import no_such_library\n")
    monkeypatch.setattr(sys, "path", [str(info.parent), *sys.path])
    monkeypatch.setattr(ExtensionManager, "ENTRY_POINT_CACHE", {})


@pytest.mark.usefixtures("broken")
def test_a_library_that_is_missing_fails_its_backend_alone(
    host: HostUnderTest,
) -> None:
    host.set("enabled_backends", ["raw", "needy"])
    host.raw_image()
    manager = host.manager()
    manager.create(host.instance())
    with pytest.raises(exc.MissingDependency, match="no_such_library") as caught:
        manager.create(host.instance(imagebackend__backend="needy"))
    assert "install what it needs" in caught.value.message
    by_name = {status.name: status for status in manager.backends()}
    assert by_name["raw"].findings[0].severity is Severity.OK
    assert by_name["needy"].findings[0].severity is Severity.ERROR
    assert by_name["qcow2"].enabled is False
    assert len(manager.capacity()) == 2  # raw, and the image cache


# --- the check of a host ------------------------------------------------------------


def test_check_finds_what_cannot_work_and_changes_nothing(host: HostUnderTest) -> None:
    before = sorted(host.path.rglob("*"))
    fine = list(host.manager().check())
    errors = [each for each in fine if each.severity is Severity.ERROR]
    assert errors == []
    assert sorted(host.path.rglob("*")) == before
    host.set("default_backend", "nowhere")
    host.set("cache_path", "/srv/nova/instances/_base", "imagebackend_images")
    host.set("cache_modes", ["file=fast"], "imagebackend_libvirt")
    host.set("source", "nothing", "imagebackend_images")
    host.set("connection", "sqlite://", "imagebackend_store")
    found = {
        each.subject: each.what
        for each in host.manager().check()
        if each.severity is Severity.ERROR
    }
    assert set(found) >= {
        *("store", "defaults", "image source", "image cache", "disk XML")
    }
    assert "nowhere" in found["defaults"] and "_base" in found["image cache"]


def test_a_process_whose_threads_are_green_is_told_so(host: HostUnderTest) -> None:
    import types

    patcher = types.ModuleType("eventlet.patcher")
    patcher.is_monkey_patched = lambda what: what == "thread"  # type: ignore[attr-defined]
    sys.modules["eventlet.patcher"] = patcher
    try:
        with pytest.raises(exc.ConfigError, match="eventlet"):
            host.manager()
    finally:
        del sys.modules["eventlet.patcher"]


def test_a_password_that_is_taken_for_a_template_is_not_shown(
    host: HostUnderTest,
) -> None:
    with host.config_file.open("a") as file:
        file.write("[imagebackend_store]\nconnection = mysql://u:pa$hunter2@h/x\n")
    host.conf(["--config-file", str(host.config_file)], project="imagebackend")
    with pytest.raises(exc.ConfigError, match=r"connection.*written as \$\$") as caught:
        host.manager()
    assert "hunter2" not in caught.value.message and caught.value.__suppress_context__
    assert caught.value.__cause__ is None
    text = host.config_file.read_text().replace("$", "$$")
    host.config_file.write_text(text)
    host.conf(["--config-file", str(host.config_file)], project="imagebackend")
    assert "pa$hunter2" in host.conf.imagebackend_store.connection


def test_a_file_where_a_folder_should_be_is_found_by_the_check(
    host: HostUnderTest,
) -> None:
    (host.path / "file").touch()
    host.set("state_path", str(host.path / "file" / "state"))
    found = {
        each.subject: each.what
        for each in host.manager().check()
        if each.severity is Severity.ERROR
    }
    assert "file is no folder" in found["state path"]
    assert "file is no folder" in found["qcow2"]


def test_keystones_options_are_known_and_a_misspelt_one_is_not(
    host: HostUnderTest,
) -> None:
    with open(host.conf.config_file[0], "a") as file:
        file.write(
            "[imagebackend_glance]\nauth_type = password\nauth_url = http://x\n"
            "username = me\npassword = secret\nproject_name = service\n"
            "user_domain_name = Default\nproject-domain-name = Default\n"
            "region_name = one\nvalid_interfaces = internal\ncafile = /x\n"
            "usrname = me\n"
        )
    host.conf.reload_config_files()
    unknown = [
        each.subject
        for each in host.manager().check()
        if "nothing reads it" in each.what
    ]
    assert len(unknown) == 1 and unknown[0].endswith("option usrname")
