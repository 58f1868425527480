# SPDX-License-Identifier: Apache-2.0
"""The command: what it prints, its exit codes, and that it does what it says."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from imagebackend import DiskManager, DiskSpec, Flavor, Lifecycle, Role
from imagebackend import exceptions as exc
from imagebackend.cli import arguments, output, progress
from imagebackend.cli.app import NAMESPACE, Commands, main
from imagebackend.libvirt.guest import Guest
from imagebackend.model import Finding, Progress, Severity, UploadTarget
from tests.conftest import GiB, HostUnderTest, MiB

ESCAPE = "\x1b[2J"
FLAVOR = {"--flavor-file", "--root-gb", "--ephemeral-gb", "--swap-mb", "--extra-spec"}
LIST = {"--format", "--column", "--sort-column", "--noindent", "--max-width"}
SHOW = {"--format", "--column", "--noindent", "--max-width"}
OPTIONS = {
    "audit": {"--all", *LIST},
    "backend list": LIST,
    "cache list": LIST,
    "cache prefetch": {"IMAGE", *LIST},
    "cache prune": {"--dry-run", *LIST},
    "capacity": LIST,
    "config check": LIST,
    "db upgrade": SHOW,
    "disk create": {
        *("INSTANCE", "--image", "--project", "--disk", "--dry-run"),
        *FLAVOR,
        *LIST,
    },
    "disk delete": {"INSTANCE", "--disk", *LIST},
    "disk flatten": {"DISK"},
    "disk list": {"--instance", "--long", *LIST},
    "disk rebuild": {"INSTANCE", "--image", *LIST},
    "disk resize": {"INSTANCE", "--running", *FLAVOR, *LIST},
    "disk show": {"DISK|INSTANCE", "NAME", *SHOW},
    "disk snapshot": {"INSTANCE", "IMAGE", "--disk-format", "--running", *SHOW},
    "disk xml": {"INSTANCE", "--no-connect", "--disconnect"},
    "recover": {"--apply", *LIST},
}


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(host: HostUnderTest, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command on the host under test."""

    def call(*argv: str) -> Result:
        code = main([*argv, "--config-file", str(host.config_file)])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def ok(run: Run) -> Callable[..., Any]:
    """What the command prints as JSON, when it succeeds and complains of nothing."""

    def call(*argv: str) -> Any:
        result = run(*argv, "-f", "json")
        assert (result.code, result.err) == (0, "")
        return result.json

    return call


@pytest.fixture
def instance(host: HostUnderTest, ok: Callable[..., Any]) -> str:
    """An instance with a root and a swap disk."""
    host.raw_image()
    instance_id = str(uuid.uuid4())
    flavor = ("--root-gb", "1", "--swap-mb", "16")
    ok("disk", "create", instance_id, "--image", "raw-image", *flavor)
    return instance_id


def one_line(text: str) -> bool:
    return text.startswith("imagebackend: ") and text.count("\n") == 1


# --- help and misuse ----------------------------------------------------------


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_every_argument(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert OPTIONS[command] <= set(words)


def test_every_command_is_tested_for_its_help() -> None:
    commands = set(Commands(NAMESPACE).get_command_names())
    assert commands - {"demo"} == set(OPTIONS)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in OPTIONS:
        assert f"  {command} " in text


def test_help_command_is_the_same_as_the_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["help"]) == 0
    assert "disk create" in capsys.readouterr().out
    assert main(["help", "disk", "create"]) == 0
    first = capsys.readouterr().out
    assert main(["disk", "create", "--image", "x", "--help"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["disk"],
        ["--nonsense", "disk", "list"],
        ["help", "nonsense"],
        ["disk", "list", "--nonsense"],
        ["disk", "list", "-c", "nonsense"],
        ["disk", "show"],
        ["disk", "delete"],
        ["disk", "delete", str(uuid.uuid4()), "--disk", str(uuid.uuid4())],
        ["disk", "create"],
        ["disk", "create", str(uuid.uuid4())],
        ["disk", "create", str(uuid.uuid4()), "--root-gb", "-1"],
        ["disk", "create", str(uuid.uuid4()), "--disk", "size=1X"],
        ["disk", "create", str(uuid.uuid4()), "--extra-spec", "key"],
        ["disk", "create", str(uuid.uuid4()), "--root-gb", "1", "-c", "nonsense"],
        ["disk", "resize", str(uuid.uuid4())],
        ["disk", "snapshot", str(uuid.uuid4()), "x", "--disk-format", "vmdk"],
        ["disk", "xml", str(uuid.uuid4()), "--no-connect", "--disconnect"],
        ["cache", "prefetch"],
    ],
)
def test_misuse_exits_2_and_makes_nothing(
    argv: list[str], run: Run, host: HostUnderTest
) -> None:
    result = run(*argv)
    assert result.code == 2
    assert result.out == ""
    assert "error: " in result.err and "Traceback" not in result.err
    assert host.files() == []


def test_unknown_command_names_what_was_meant(run: Run) -> None:
    assert "did you mean disk list" in run("disk", "lsit").err
    assert "disk create" in run("disk").err


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("imagebackend ")


# --- errors -------------------------------------------------------------------


def test_error_is_one_line_and_exit_1(run: Run) -> None:
    result = run("disk", "show", str(uuid.uuid4()), "root")
    assert result.code == 1
    assert result.out == ""
    assert one_line(result.err)


def test_debug_shows_the_traceback(run: Run) -> None:
    result = run("--debug", "disk", "show", str(uuid.uuid4()), "root")
    assert result.code == 1
    assert "Traceback" in result.err and "InstanceNotFound" in result.err


def test_configuration_error_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.conf"
    broken.write_text("nonsense")
    for file in (broken, tmp_path / "missing.conf"):
        assert main(["--config-file", str(file), "disk", "list"]) == 1
        err = capsys.readouterr().err
        assert one_line(err) and str(file) in err


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_self: DiskManager) -> None:
        raise error

    monkeypatch.setattr(DiskManager, "capacity", fail)


def test_fault_of_the_library_asks_to_be_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, KeyError("gone"))
    result = run("capacity")
    assert result.code == 1
    assert one_line(result.err)
    assert "KeyError" in result.err and "--debug" in result.err


def test_message_of_several_lines_is_one_line_and_harmless(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, exc.StorageError(f"no\nroom {ESCAPE}"))
    result = run("capacity")
    assert result.err == "imagebackend: no room \\x1b[2J\n"


def test_interrupt_exits_130_with_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    result = run("capacity")
    assert (result.code, result.err) == (130, "imagebackend: interrupted\n")


def test_reader_that_left_is_no_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, BrokenPipeError())
    result = run("capacity")
    assert (result.code, result.err) == (141, "")


def test_warning_is_one_line_and_info_needs_verbose(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capacity(_self: DiskManager) -> list[Any]:
        logging.getLogger("imagebackend.test").warning("two\nlines")
        logging.getLogger("imagebackend.test").info("detail")
        return []

    monkeypatch.setattr(DiskManager, "capacity", capacity)
    assert run("capacity").err == "imagebackend: warning: two lines\n"
    assert "imagebackend: info: detail\n" in run("capacity", "-v").err


def test_runs_leave_no_log_handlers(run: Run) -> None:
    before = list(logging.getLogger().handlers)
    run("disk", "list")
    run("nonsense")
    assert logging.getLogger().handlers == before


# --- disk ---------------------------------------------------------------------


def test_dry_run_shows_the_plan_and_makes_nothing(
    host: HostUnderTest, ok: Callable[..., Any]
) -> None:
    host.raw_image()
    argv = ["disk", "create", str(uuid.uuid4()), "--image", "raw-image"]
    root, swap = ok(*argv, "--root-gb", "1", "--swap-mb", "16", "--dry-run")
    assert root == {
        "Name": "root",
        "Role": "root",
        "Lifecycle": "ephemeral",
        "Size": GiB,
        "Backend": "qcow2",
        "Format": "qcow2",
        "Content": "clone",
        "Bus": "virtio",
        "Device": "vda",
        "Image": "raw-image",
        "Chosen By": "host",
    }
    assert (swap["Name"], swap["Size"], swap["Image"]) == ("swap", 16 * MiB, None)
    assert host.files() == []
    assert ok("disk", "list") == []


def test_create_makes_what_manager_lists(
    host: HostUnderTest, manager: DiskManager, ok: Callable[..., Any]
) -> None:
    host.raw_image()
    instance_id = str(uuid.uuid4())
    argv = ["disk", "create", instance_id, "--image", "raw-image", "--root-gb", "1"]
    disk = "name=data,size=8M,lifecycle=persistent,fs=ext4,backend=raw"
    rows = ok(*argv, "--project", "p1", "--disk", disk)
    disks = {disk.name: disk for disk in manager.list(instance_id)}
    assert {row["Name"]: row["Disk ID"] for row in rows} == {
        name: disk.id for name, disk in disks.items()
    }
    assert [row["Change"] for row in rows] == ["created", "created"]
    assert disks["data"].lifecycle is Lifecycle.PERSISTENT
    assert disks["data"].backend == "raw"
    assert disks["data"].size == 8 * MiB
    assert disks["root"].project_id == "p1"


def test_create_again_keeps_the_disks(
    host: HostUnderTest, ok: Callable[..., Any]
) -> None:
    host.raw_image()
    argv = ["disk", "create", str(uuid.uuid4()), "--image", "raw-image"]
    first = ok(*argv, "--root-gb", "1")
    again = ok(*argv, "--root-gb", "1")
    assert [row["Change"] for row in again] == ["kept"]
    assert again[0]["Disk ID"] == first[0]["Disk ID"]


def test_flavor_file_and_extra_spec_choose_the_backend(
    host: HostUnderTest, ok: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "flavor.json"
    specs = {"imagebackend:backend": "raw"}
    file.write_text(json.dumps({"name": "f", "root_gb": 1, "extra_specs": specs}))
    argv = ["disk", "create", str(uuid.uuid4()), "--dry-run"]
    (by_file,) = ok(*argv, "--flavor-file", str(file))
    spec = "imagebackend:backend=raw"
    (by_option,) = ok(*argv, "--root-gb", "1", "--extra-spec", spec)
    assert by_file["Backend"] == by_option["Backend"] == "raw"
    assert by_file["Chosen By"] == "flavor 'f'"


def test_people_get_units_and_a_summary(host: HostUnderTest, run: Run) -> None:
    host.raw_image()
    argv = ["disk", "create", str(uuid.uuid4()), "--image", "raw-image"]
    result = run(*argv, "--root-gb", "1")
    assert " 1.0 GiB |" in result.out
    assert result.err == "created root (qcow2, clone), 1.0 GiB\n"
    assert run(*argv, "--root-gb", "1").err == "nothing changed\n"
    assert run(*argv, "--root-gb", "1", "-q").err == ""


def test_list_streams_and_says_if_there_is_nothing(run: Run) -> None:
    result = run("disk", "list")
    assert (result.code, result.out, result.err) == (0, "", "no disks are recorded\n")
    assert run("disk", "list", "-f", "json").json == []


def test_list_by_instance(instance: str, ok: Callable[..., Any], run: Run) -> None:
    rows = ok("disk", "list", "--instance", instance)
    assert [row["Name"] for row in rows] == ["root", "swap"]
    assert [row["Size"] for row in rows] == [GiB, 16 * MiB]
    assert "Role" in ok("disk", "list", "--long")[0]
    value = run("disk", "list", "-f", "value", "-c", "Size", "--instance", instance)
    assert value.out == f"{GiB}\n{16 * MiB}\n"
    assert ok("disk", "list", "--instance", str(uuid.uuid4())) == []


def test_show_by_id_and_by_name(instance: str, ok: Callable[..., Any]) -> None:
    by_name = ok("disk", "show", instance, "root")
    assert by_name == ok("disk", "show", by_name["ID"])
    assert by_name["Size"] == GiB
    assert by_name["Owners"] == [instance]
    assert by_name["Handle"]["path"].startswith(instance)


def test_show_names_the_disks_that_there_are(instance: str, run: Run) -> None:
    assert "root, swap" in run("disk", "show", instance, "data").err


def test_delete_keeps_what_is_persistent_until_asked(
    host: HostUnderTest, ok: Callable[..., Any]
) -> None:
    instance_id = str(uuid.uuid4())
    disks = ("name=a,size=1M,lifecycle=persistent", "name=b,size=1M")
    ok("disk", "create", instance_id, "--disk", disks[0], "--disk", disks[1])
    changes = {row["Name"]: row for row in ok("disk", "delete", instance_id)}
    assert (changes["a"]["Change"], changes["b"]["Change"]) == ("detached", "deleted")
    (kept,) = ok("disk", "list")
    assert (kept["Name"], kept["State"]) == ("a", "kept")
    (gone,) = ok("disk", "delete", "--disk", kept["ID"])
    assert gone["Change"] == "deleted" and gone["Size"] is None
    assert ok("disk", "list") == []
    assert host.files() == []


def test_delete_of_nothing_succeeds(run: Run) -> None:
    result = run("disk", "delete", str(uuid.uuid4()))
    assert (result.code, result.err) == (0, "nothing to do\n")


def test_resize_changes_only_what_is_said(
    instance: str, ok: Callable[..., Any], run: Run
) -> None:
    root, swap = ok("disk", "resize", instance, "--root-gb", "2")
    assert (root["Change"], root["Size"]) == ("grown", 2 * GiB)
    assert (swap["Change"], swap["Size"]) == ("kept", 16 * MiB)
    result = run("disk", "resize", instance, "--swap-mb", "32")
    assert result.err == "grew swap (qcow2), 16.0 MiB -> 32.0 MiB\n"


def test_resize_never_shrinks(instance: str, run: Run) -> None:
    run("disk", "resize", instance, "--root-gb", "2")
    result = run("disk", "resize", instance, "--root-gb", "1")
    assert result.code == 1 and one_line(result.err)


def test_running_guest_is_looked_up_by_uuid(
    instance: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = []

    class Fake:
        def __init__(self, uuid: str) -> None:
            self.uuid = uuid

        def backup(self) -> None: ...

        def frozen(self) -> nullcontext[None]:
            return nullcontext()

        def block_resize(self, serial: str, size: int) -> None:
            grown.append((self.uuid, serial, size))

    monkeypatch.setattr(Guest, "lookup", lambda _conf, uuid: Fake(uuid))
    run("disk", "resize", instance, "--root-gb", "2", "--running")
    ((guest, _, size),) = grown
    assert (guest, size) == (instance, 2 * GiB)


def test_guest_that_does_not_run_is_one_line(
    instance: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(_conf: object, uuid: str) -> Guest:
        raise exc.HypervisorError(f"guest {uuid} does not run")

    monkeypatch.setattr(Guest, "lookup", lookup)
    for argv in (("resize", "--root-gb", "2"), ("snapshot", "new")):
        result = run("disk", argv[0], instance, *argv[1:], "--running")
        assert (result.code, result.out) == (1, "")
        assert one_line(result.err) and "does not run" in result.err


def test_rebuild_keeps_ids(
    host: HostUnderTest, instance: str, ok: Callable[..., Any]
) -> None:
    host.qcow2_image()
    before = [row["ID"] for row in ok("disk", "list", "--instance", instance)]
    rows = ok("disk", "rebuild", instance, "--image", "qcow2-image")
    assert [row["Change"] for row in rows] == ["recreated", "recreated"]
    assert [row["Disk ID"] for row in rows] == before
    assert ok("disk", "show", instance, "root")["Image"] == "qcow2-image"


@pytest.mark.parametrize("format_", ["qcow2", "raw"])
def test_snapshot_by_id_and_by_path(
    format_: str, host: HostUnderTest, instance: str, ok: Callable[..., Any]
) -> None:
    argv = ("disk", "snapshot", instance)
    made = ok(*argv, "new", "--disk-format", format_)
    path = host.images / f"new.{format_}"
    assert path.exists()
    assert (made["Image"], made["Disk Format"]) == ("new", format_)
    assert made["Size"] == path.stat().st_size
    target = host.path / "copy"
    assert ok(*argv, str(target), "--disk-format", format_)["Image"] == str(target)
    assert target.exists()


def test_xml_connects_unless_told_otherwise(
    instance: str, run: Run, ok: Callable[..., Any]
) -> None:
    assert run("disk", "xml", instance, "--no-connect").out == ""
    result = run("disk", "xml", instance)
    assert result.code == 0
    assert result.out.count("<disk ") == 2
    assert ok("disk", "show", instance, "root")["Connected"] is True
    assert run("disk", "xml", instance, "--no-connect").out == result.out
    assert run("disk", "xml", instance, "--disconnect").out == ""
    assert ok("disk", "show", instance, "root")["Connected"] is False


# --- cache and host -----------------------------------------------------------


def test_cache_list_prefetch_and_prune(
    host: HostUnderTest, ok: Callable[..., Any], run: Run
) -> None:
    host.raw_image()
    assert ok("cache", "list") == []
    (fetched,) = ok("cache", "prefetch", "raw-image")
    assert (fetched["Image"], fetched["Virtual Size"]) == ("raw-image", MiB)
    assert Path(fetched["Path"]).exists()
    (entry,) = ok("cache", "list")
    assert entry["Entry"] == fetched["Entry"]
    assert entry["Virtual Size"] == MiB and entry["Broken"] == ""
    assert entry["Last Used"].endswith("+00:00")
    with host.config_file.open("a") as file:
        file.write("[imagebackend_images]\ncache_max_age = 0\n")
    (would,) = ok("cache", "prune", "--dry-run")
    assert fetched["Entry"] in would["Subject"] and would["Action"]
    assert len(ok("cache", "list")) == 1
    assert len(ok("cache", "prune")) == 1
    assert ok("cache", "list") == []
    assert run("cache", "prune").err == "nothing to remove\n"


def test_prefetch_goes_on_after_a_missing_image(host: HostUnderTest, run: Run) -> None:
    host.raw_image()
    result = run("cache", "prefetch", "missing", "raw-image", "-f", "json")
    assert result.code == 1
    assert [row["Image"] for row in result.json] == ["raw-image"]
    assert one_line(result.err) and "missing" in result.err


def test_capacity_in_bytes(instance: str, ok: Callable[..., Any], run: Run) -> None:
    rooms = {room["Backend"]: room for room in ok("capacity")}
    assert rooms["qcow2"]["Total"] > rooms["qcow2"]["Free"] > 0
    assert rooms["image cache"]["Used By Us"] > 0
    assert rooms["image cache"]["Total"] is None
    assert "iB" in run("capacity").out


def test_backend_list(ok: Callable[..., Any]) -> None:
    backends = {row["Name"]: row for row in ok("backend", "list")}
    assert backends["qcow2"]["Driver"] == "qcow2"
    assert backends["raw"]["Enabled"] is True
    assert backends["raw"]["State"] == "ok"


def test_audit_of_a_sound_host_finds_nothing(
    instance: str, ok: Callable[..., Any], run: Run
) -> None:
    assert ok("audit") == []
    assert run("audit").err == "no errors, no warnings\n"


def test_audit_error_exits_1(instance: str, host: HostUnderTest, run: Run) -> None:
    (host.path / "instances" / host.files()[0]).unlink()
    result = run("audit", "-f", "json")
    assert result.code == 1
    assert {row["Severity"] for row in result.json} == {"error"}
    assert all(row["What"] and row["Advice"] for row in result.json)


def test_audit_shows_what_is_in_order_only_when_asked(
    instance: str, host: HostUnderTest, ok: Callable[..., Any], run: Run
) -> None:
    foreign = f"foreign{ESCAPE}"
    (host.path / "instances" / instance / foreign).write_text("")
    assert ok("audit") == []
    (finding,) = ok("audit", "--all")
    assert finding["Severity"] == "ok" and foreign in finding["Subject"]
    for format_ in ("table", "value", "csv", "json", "yaml"):
        assert "\x1b" not in run("audit", "--all", "-f", format_).out


def test_recover_applies_only_when_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def recover(_self: DiskManager, *, dry_run: bool = True) -> Iterator[Finding]:
        asked.append(dry_run)
        yield Finding(Severity.WARNING, "operation", "died", action="settled")

    monkeypatch.setattr(DiskManager, "recover", recover)
    result = run("recover", "-f", "json")
    assert result.json[0]["Action"] == "settled"
    assert "--apply" in run("recover").err
    assert run("recover", "--apply").err == ""
    assert asked == [True, True, False]


def test_recover_of_a_sound_host(ok: Callable[..., Any], run: Run) -> None:
    assert ok("recover") == []
    assert ok("recover", "--apply") == []
    assert run("recover").err == "nothing to recover\n"


def test_config_check(run: Run, host: HostUnderTest) -> None:
    result = run("config", "check", "-f", "json")
    assert result.code == 0
    assert "qcow2" in {row["Subject"] for row in result.json}
    text = host.config_file.read_text()
    host.config_file.write_text(text.replace("qcow2, raw", "qcow2, nonsense"))
    result = run("config", "check", "-f", "json")
    assert result.code == 1
    assert "nonsense" in {
        row["Subject"] for row in result.json if row["Severity"] == "error"
    }


def test_db_upgrade_says_before_and_after(ok: Callable[..., Any], run: Run) -> None:
    ok("disk", "list")
    revisions = ok("db", "upgrade")
    assert revisions["Before"] == revisions["After"]
    assert "already" in run("db", "upgrade").err


def test_db_upgrade_makes_the_store_of_a_new_host(ok: Callable[..., Any]) -> None:
    revisions = ok("db", "upgrade")
    assert revisions["Before"] is None and revisions["After"]


# --- arguments ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("512", 512), ("1K", 1024), ("2m", 2 * MiB), ("3GiB", 3 * GiB)],
)
def test_size(text: str, number: int) -> None:
    assert arguments.size(text) == number


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "1X", "G", "1 G", "\u0661"])
def test_size_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.size(text)


def test_disk_spec_understands_every_field() -> None:
    text = (
        "name=n,size=1M,image=i,role=swap,lifecycle=persistent,shareable,backend=b,"
        "pool=p,volume-type=a,,b,fs=xfs,label=l,bus=scsi,cdrom=no"
    )
    assert arguments.disk_spec(text) == DiskSpec(
        name="n",
        size=MiB,
        image="i",
        role=Role.SWAP,
        lifecycle=Lifecycle.PERSISTENT,
        shareable=True,
        backend="b",
        pool="p",
        volume_type="a,b",
        fs="xfs",
        label="l",
        bus="scsi",
        cdrom=False,
    )
    fields = {name.replace("_", "-") for name in DiskSpec.__dataclass_fields__}
    assert set(arguments.DISK_KEYS) == fields


@pytest.mark.parametrize(
    "text",
    ["", "name", "name=", "nonsense=1", "size=1,size=2", "role=x", "cdrom=perhaps"],
)
def test_disk_spec_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.disk_spec(text)


@pytest.mark.parametrize(
    "shown",
    [
        {
            "name": "m1",
            "disk": 10,
            "OS-FLV-EXT-DATA:ephemeral": 5,
            "swap": "",
            "ram": 512,
            "properties": {"imagebackend:backend": "raw"},
        },
        {
            "original_name": "m1",
            "disk": 10,
            "ephemeral": 5,
            "swap": 0,
            "vcpus": 1,
            "extra_specs": {"imagebackend:backend": "raw"},
        },
    ],
)
def test_flavor_as_nova_shows_it(shown: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "flavor.json"
    file.write_text(json.dumps(shown))
    assert arguments.flavor_file(str(file)) == Flavor(
        "m1", 10, 5, 0, {"imagebackend:backend": "raw"}
    )


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        '{"root_gbb": 1}',
        '{"root_gb": "1"}',
        '{"root_gb": -1}',
        '{"root_gb": true}',
        '{"name": 1}',
        '{"extra_specs": []}',
    ],
)
def test_flavor_file_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "flavor.json"
    file.write_text(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"flavor\.json"):
        arguments.flavor_file(str(file))


# --- what a message says ------------------------------------------------------


def test_an_instance_in_place_of_a_disk_is_told_its_disks(
    instance: str, run: Run
) -> None:
    shown = run("disk", "show", instance)
    assert shown.code == 1 and "is an instance" in shown.err
    assert "root" in shown.err and "swap" in shown.err
    assert "is not recorded" in run("disk", "show", str(uuid.uuid4())).err


def test_xml_of_what_is_not_connected_is_an_error(instance: str, run: Run) -> None:
    printed = run("disk", "xml", instance, "--no-connect")
    assert printed.code == 1 and "--no-connect" in printed.err
    assert run("disk", "xml", instance).code == 0
    assert "<disk" in run("disk", "xml", instance, "--no-connect").out


def test_a_disk_beside_the_flavor_is_told_what_it_needs(run: Run) -> None:
    argv = ["disk", "create", str(uuid.uuid4()), "--root-gb", "1", "--disk"]
    refused = run(*argv, "name=x,size=1M")
    assert refused.code == 1
    assert "--ephemeral-gb" in refused.err and "lifecycle=persistent" in refused.err
    assert run(*argv, "name=x,size=1M,lifecycle=persistent").code == 0


@pytest.mark.parametrize("role", ["rescue", "nonsense"])
def test_no_role_is_offered_that_is_refused(run: Run, role: str) -> None:
    refused = run("disk", "create", str(uuid.uuid4()), "--disk", f"size=1M,role={role}")
    assert refused.code == 2
    assert refused.err.endswith("must be one of root, ephemeral, swap, config\n")


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_an_image_that_is_no_file_is_said_to_be_none(
    host: HostUnderTest, run: Run, kind: str
) -> None:
    path = host.images / "odd.raw"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    refused = run("disk", "create", str(uuid.uuid4()), "--image", "odd")
    assert refused.code == 1
    assert refused.err == (
        f"imagebackend: {path} is not a regular file: an image has to be one\n"
    )


def test_a_file_in_place_of_the_state_path_is_named(
    host: HostUnderTest, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    host.config_file.write_text(f"[imagebackend]\nstate_path = {file}\n")
    assert run("disk", "list").err.endswith(f": {file} is not a folder\n")


# --- config check -------------------------------------------------------------


def problems(run: Run) -> dict[str, tuple[str, str]]:
    found = run("config", "check", "-f", "json").json
    return {
        each["Subject"]: (each["Severity"], each["What"] + each["Advice"])
        for each in found
        if each["Severity"] != "ok"
    }


@pytest.mark.parametrize(
    ("group", "option", "subject"),
    [
        ("imagebackend", "state_path", "state path"),
        ("imagebackend_images", "folder", "image source"),
        ("imagebackend_images", "cache_path", "image cache"),
        ("qcow2", "instances_path", "qcow2"),
    ],
)
@pytest.mark.parametrize("bad", ["/proc/nowhere", "/etc/passwd", "/etc/passwd/x"])
def test_a_place_that_cannot_be_is_an_error(
    host: HostUnderTest, run: Run, group: str, option: str, subject: str, bad: str
) -> None:
    before = problems(run)
    with host.config_file.open("a") as file:
        file.write(f"[{group}]\n{option} = {bad}\n")
    found = problems(run)
    assert subject not in before
    severity, what = found[subject]
    assert severity == "error" and ("/proc" in what or "/etc/passwd" in what)


def test_what_nothing_reads_is_a_warning(host: HostUnderTest, run: Run) -> None:
    before = problems(run)
    with host.config_file.open("a") as file:
        file.write(
            "enabled_backend = qcow2\n"
            "[imagebackend_image]\nfolder = /x\n"
            "[imagebackend_store]\nbusy_timeout = 5\n"
            "[qcow2]\ndriver = qcow2\ninstancs_path = /x\npreallocate = false\n"
            "[somebody_else]\nx = y\n"
        )
    found = {
        subject: what
        for subject, what in problems(run).items()
        if subject not in before
    }
    path = host.config_file
    assert found == {
        f"[imagebackend] of {path}: option enabled_backend": (
            "warning",
            "is not known: nothing reads itdid you mean enabled_backends?",
        ),
        f"[imagebackend_image] of {path}: the group": (
            "warning",
            "is not known: nothing reads itdid you mean imagebackend_images?",
        ),
        f"[qcow2] of {path}: option instancs_path": (
            "warning",
            "is not known: nothing reads itdid you mean instances_path?",
        ),
    }
    assert run("config", "check").code == 0


def test_a_newer_store_needs_a_newer_version(
    host: HostUnderTest, instance: str, run: Run
) -> None:
    store = host.path / "store" / "imagebackend.sqlite"
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    _, what = problems(run)["store"]
    assert "upgrade imagebackend" in what and "db upgrade" not in what
    store.write_bytes(b"no database" * 1000)
    assert "audit" not in run("disk", "list").err


# --- output and progress ------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (10 * GiB, "10.0 GiB"),
        (MiB - 1, "1.0 MiB"),
        (2**80, "1048576.0 EiB"),
    ],
)
def test_size_for_people(number: int, text: str) -> None:
    assert output.size(number) == text


def test_escape_leaves_letters_of_all_languages() -> None:
    assert output.escape("Zoë 盘") == "Zoë 盘"
    assert output.escape("a\x1b[1m\n\u202e\udc80") == "a\\x1b[1m\\n\\u202e\\udc80"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_is_drawn_ten_times_a_second_and_erased() -> None:
    terminal, now = Terminal(), 0.0
    bar = progress.Bar(terminal, lambda: now)
    for step in range(100):
        now = step / 100
        bar(Progress("copy", step, 100))
    assert terminal.getvalue().count("\r") == 10
    bar.erase()
    last = terminal.getvalue().split("\r")
    assert last[-1] == "" and last[-2].strip() == ""
    assert len(last[-2]) == len(last[-3])


def test_new_step_is_drawn_at_once_over_the_old_one() -> None:
    terminal = Terminal()
    bar = progress.Bar(terminal, lambda: 0.0)
    bar(Progress("a long name", 1, 2))
    bar(Progress("b", 1, 0))
    first, second = terminal.getvalue().split("\r")[1:]
    assert "50%" in first
    assert second.strip() == "b 1 B" and len(second) == len(first)


@pytest.mark.parametrize("columns", [0, 5, 12, 40, 200])
def test_progress_fits_the_terminal(columns: int) -> None:
    for total in (0, 100):
        shown = progress.line(Progress(f"x{ESCAPE}", 150, total), columns)
        assert len(shown) <= columns and "\x1b" not in shown


def test_progress_only_on_a_terminal(
    host: HostUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.raw_image()
    seen = []

    def prefetch(_self: DiskManager, _id: str, *, progress: Any = None) -> None:
        seen.append(progress)
        raise exc.ImageNotFound("none")

    monkeypatch.setattr(DiskManager, "prefetch", prefetch)
    argv = ["--config-file", str(host.config_file), "cache", "prefetch", "x"]
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        main(argv)
    assert seen[0] is None
    assert isinstance(seen[1], progress.Bar)


def test_snapshot_goes_where_the_manager_is_told(
    instance: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def snapshot(
        _self: DiskManager, _id: str, into: UploadTarget, *_args: Any, **_kwargs: Any
    ) -> None:
        told.append(into)
        raise exc.NotSupported("enough")

    monkeypatch.setattr(DiskManager, "snapshot", snapshot)
    run("disk", "snapshot", instance, "new", "--disk-format", "raw")
    assert told == [UploadTarget("new", disk_format="raw")]


def test_a_host_that_is_gone_is_forgotten_only_by_its_id(
    host: HostUnderTest, ok: Callable[..., Any], run: Run
) -> None:
    host.raw_image()
    ok("cache", "prefetch", "raw-image")
    assert run("cache", "prune", "--forget-host", "nobody").code == 1
    assert run("cache", "prune", "--dry-run", "--forget-host", "x").code == 2
