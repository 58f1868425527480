# SPDX-License-Identifier: Apache-2.0
"""The guides say what the code does: their examples run, their tables are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from oslo_config import cfg
from stevedore import DriverManager

import imagebackend
import imagebackend.conf
from imagebackend import DiskManager
from imagebackend import exceptions as exc
from imagebackend.backends import cinder_volume
from imagebackend.backends.base import Backend
from imagebackend.cli.app import NAMESPACE, Commands, ImageBackendApp
from imagebackend.conf.backends import DRIVER
from imagebackend.conf.keystone import keystone_options, plugin_options
from imagebackend.libvirt.guest import Guest
from imagebackend.model import Capabilities, DiskState, Generation
from imagebackend.qemu_img import QemuImg
from imagebackend.validation import FLAVOR_KEYS, QUOTA_KEYS
from tests.conftest import HostUnderTest

ROOT = Path(__file__).parents[2]
DOC = ROOT / "doc" / "source"
TREE = re.compile(r"^\.\. toctree::\n(?:   :.*\n)*\n((?:   .*\n)+)", re.MULTILINE)
#: A line of a table that begins with a literal.
ROW = re.compile(r"^``([^`]+)``(?:  +|$)(?:``([A-Za-z]+)``  )?", re.MULTILINE)


def blocks(page: str, language: str) -> Iterator[str]:
    block = re.compile(
        rf"^\.\. code-block:: {language}\n\n((?:   .*\n|\n)+)", re.MULTILINE
    )
    for body in block.findall((DOC / page).read_text()):
        yield re.sub("^   ", "", body, flags=re.MULTILINE)


def pages(guide: str) -> list[str]:
    """In the order in which they are read."""
    (names,) = TREE.findall((DOC / guide / "index.rst").read_text())
    return [f"{guide}/{name}.rst" for name in names.split()]


def rows(page: str, after: str = "") -> list[str]:
    """First cells of the tables that begin with a literal."""
    text = (DOC / page).read_text().partition(after)[2] if after else None
    return [row[0] for row in ROW.findall(text or (DOC / page).read_text())]


# --- examples -------------------------------------------------------------------


class StandIn:
    """Does to a disk's file what a running QEMU would do."""

    def __init__(self, host: HostUnderTest, manager: DiskManager, uuid: str) -> None:
        self._qemu_img = QemuImg(host.conf)
        self.uuid = uuid
        self._sources = dict(
            zip(
                (disk.id for disk in manager.list(uuid)),
                (each.source for each in manager.connect(uuid)),
                strict=True,
            )
        )

    def block_resize(self, serial: str, size: int) -> None:
        self._qemu_img.resize(self._sources[serial], size)

    def backup(
        self, files: Mapping[str, str], format_: str, **_options: object
    ) -> None:
        for serial, path in files.items():
            self._qemu_img.convert_to_file(self._sources[serial], path, format_)

    @contextlib.contextmanager
    def frozen(self, **_options: object) -> Iterator[None]:
        yield


def test_the_user_guides_examples_run_one_after_the_other(
    host: HostUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.raw_image("cirros")
    host.qcow2_image("debian")
    monkeypatch.chdir(host.path)
    names: dict[str, object] = {}

    def lookup(_conf: object, uuid: str) -> StandIn:
        manager = names["manager"]
        assert isinstance(manager, DiskManager)
        return StandIn(host, manager, uuid)

    monkeypatch.setattr(Guest, "lookup", lookup)
    with contextlib.ExitStack() as stack:
        done = set()
        for page in pages("user"):
            for code in blocks(page, "python"):
                exec(compile(code, page, "exec"), names)
                if not done:
                    manager = names["manager"]
                    assert isinstance(manager, DiskManager)
                    stack.enter_context(manager)
                done.add(page)
    without = {f"user/{name}.rst" for name in ("words", "libvirt", "reference")}
    assert done == set(pages("user")) - without


def test_the_operators_first_steps_work(host: HostUnderTest) -> None:
    folder = host.path / "first"
    folder.mkdir()
    host.raw_image("cirros")
    (folder / "cirros.raw").write_bytes((host.images / "cirros.raw").read_bytes())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = "".join(code for page in pages("operator") for code in blocks(page, "sh"))
    done = subprocess.run(
        ["sh", "-eux"],
        input=script,
        text=True,
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no errors, no warnings" in done.stderr


# --- tables ---------------------------------------------------------------------


def errors(root: type[exc.ImageBackendError]) -> Iterator[tuple[str, str]]:
    for each in root.__subclasses__():
        if each.__module__ == exc.__name__:
            yield each.code, each.__name__
            yield from errors(each)


def test_the_table_of_codes_is_complete() -> None:
    text = (DOC / "user/errors.rst").read_text()
    assert ROW.findall(text) == list(errors(exc.ImageBackendError))


def test_the_table_of_verbs_is_complete() -> None:
    told = rows("user/verbs.rst")
    verbs = {name for name in vars(DiskManager) if not name.startswith("_")}
    # The table of verbs comes first, those of a change's lists later.
    assert len(told) >= len(verbs)
    assert set(told[: len(verbs)]) == verbs


def test_every_verb_has_an_example_or_a_word_of_its_own() -> None:
    text = "".join(
        (DOC / page).read_text()
        for page in pages("user")
        if page not in ("user/verbs.rst", "user/reference.rst")
    )
    verbs = {name for name in vars(DiskManager) if not name.startswith("_")}
    assert not {
        name
        for name in verbs
        if f"manager.{name}(" not in text and f"``{name}``" not in text
    }


def test_the_lists_of_a_change_are_complete() -> None:
    lists = {field.name for field in dataclasses.fields(imagebackend.Change)}
    told = set(rows("user/verbs.rst", after="The change\n"))
    assert told == lists - {"instance_id"}


def test_the_public_names_are_complete() -> None:
    text = (DOC / "user/reference.rst").read_text().partition("===========\n")[0]
    told = set(re.findall(r"``([A-Z]\w+)``", text))
    assert told == set(imagebackend.__all__)


def test_states_that_are_told_of_are_states() -> None:
    text = (DOC / "user/words.rst").read_text().partition("States of a disk")[2]
    told = set(re.findall(r"``([a-z]+)``", text)) - {"reason", "operation"}
    assert told <= {str(state) for state in DiskState}


def test_the_table_of_flavor_keys_is_complete() -> None:
    told = [row for row in rows("operator/flavors.rst") if ":" in row]
    assert sorted(told) == sorted((*FLAVOR_KEYS, *QUOTA_KEYS))


def test_every_folder_of_the_state_path_is_told_of(
    host: HostUnderTest, manager: DiskManager
) -> None:
    host.raw_image()
    manager.create(host.instance())
    text = (DOC / "operator/hosts.rst").read_text()
    for path in host.path.iterdir():
        if path.name != host.config_file.name:
            name = f"{path.name}/" if path.is_dir() else path.name
            assert f"``{name}``" in text
            mode = oct(path.stat().st_mode)[-4:]
            row = next(line for line in text.splitlines() if f"``{name}``" in line)
            assert mode in row or "yours" in row, (name, mode)


#: What the columns of the tables stand for: a driver, and what is known of a disk.
COLUMNS: dict[str, tuple[str, dict[str, object]]] = {
    "qcow2": ("qcow2", {}),
    "raw": ("raw", {}),
    "rbd": ("rbd", {}),
    "cinder, network": ("cinder", {"protocol": "ceph"}),
    "cinder, files": ("cinder", {"protocol": "NFS"}),
}


def driver(name: str) -> type[Backend]:
    manager: Any = DriverManager("imagebackend.backends", name)
    return cast("type[Backend]", manager.driver)


def able(host: HostUnderTest, column: str, **more: object) -> Capabilities:
    name, facts = COLUMNS[column]
    found = driver(name)
    host.conf.register_opts(found.OPTIONS, group=name)
    gen = Generation(
        *("g", "d", "root", None, "", "", name, "folder:new", 0, "raw"),
        handle={**facts, **more},
    )
    return found(name, host.conf, "").capabilities(gen)


def table(page: str, first: str) -> list[list[str]]:
    """Cells of the table whose header begins with a word."""
    text = (DOC / page).read_text()
    lines = text[text.index(f"{first}  ") :].split("\n\n")[0].splitlines()
    return [re.split(r"  +", line) for line in lines if line[0] != "="]


def test_the_table_of_capabilities_is_true(host: HostUnderTest) -> None:
    header, *cells = table("driver/capabilities.rst", "capability")
    assert header == ["capability", *COLUMNS]
    found = [able(host, column) for column in COLUMNS]
    assert {name: values for name, *values in cells} == {
        field.name: [shown(getattr(each, field.name)) for each in found]
        for field in dataclasses.fields(Capabilities)
        # That one is what the operator wants.
        if field.name != "in_place"
    }


def test_the_table_of_features_is_true(host: HostUnderTest) -> None:
    header, *cells = table("operator/features.rst", "feature")
    titles = {"cinder, network": "cinder, network types"}
    titles["cinder, files"] = "cinder, file types"
    assert header == ["feature", *(titles.get(name, name) for name in COLUMNS)]
    found = [able(host, column) for column in COLUMNS]
    classes = [driver(name) for name, _ in COLUMNS.values()]
    may_share = [able(host, column, multiattach=True).shareable for column in COLUMNS]
    shareable = [
        shown(each.shareable) if each.shareable == may else "by type"
        for each, may in zip(found, may_share, strict=True)
    ]
    pools = [
        shown("pools" in [option.dest for option in each.OPTIONS]) for each in classes
    ]
    assert cells == [
        ["grow a running guest's disk", *(shown(each.live_resize) for each in found)],
        ["snapshot of a running guest", *(shown(each.live_snapshot) for each in found)],
        ["shareable disks", *shareable],
        [
            "clone an image where it lies",
            *(shown(each.CLONES_IMAGES) for each in classes),
        ],
        ["flatten", *(shown(each.flatten) for each in found)],
        ["pools", *pools],
        ["volume types", *(shown(each.VOLUME_TYPES) for each in classes)],
    ]


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


# --- what an operator copies ------------------------------------------------------


def test_options_of_the_operators_files_exist(host: HostUnderTest) -> None:
    known = imagebackend.conf.names(host.conf)
    seen = 0
    for page in pages("operator"):
        for text in blocks(page, "ini"):
            sections: dict[str, dict[str, list[str]]] = {}
            cfg.ConfigParser(write(host.path / "block.conf", text), sections).parse()
            for group, values in sections.items():
                if group in known:
                    names = known[group] | keystone_names_of(host, group, values)
                else:
                    names = options_of(host, group, values)
                assert set(values) <= names, (page, group, set(values) - names)
                seen += len(values)
    assert seen > 30


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def keystone_names_of(
    host: HostUnderTest, group: str, values: Mapping[str, list[str]]
) -> set[str]:
    """Those of the plugin that the block chooses."""
    if "auth_type" not in values:
        return set()
    host.conf.register_opts(keystone_options(), group=group)
    host.conf.set_override("auth_type", values["auth_type"][0], group)
    return {
        spelling
        for option in (*keystone_options(), *plugin_options(host.conf, group))
        for spelling in (option.name, option.dest)
    }


def options_of(
    host: HostUnderTest, group: str, values: Mapping[str, list[str]]
) -> set[str]:
    """Of a backend's group."""
    found = driver(values.get("driver", [group])[0])
    names = {option.dest for option in (DRIVER, *found.OPTIONS)}
    return names | keystone_names_of(host, group, values)


def test_options_that_the_pages_of_cinder_name_exist() -> None:
    options = {
        option.dest
        for _, group in imagebackend.conf.list_opts()
        for option in (*group, *driver("cinder").OPTIONS)
    }
    for page in ("operator/cinder.rst", "operator/stuck.rst"):
        text = (DOC / page).read_text()
        for name in re.findall(r"``([a-z_]+) = ", text):
            assert name in {*options, "driver", "multiattach"}, (page, name)
        told = set(re.findall(r"``([a-z]+(?:_[a-z]+)+)``", text))
        others = {
            # Of Cinder, of a flavor, of an image, and of the metadata.
            *("rbd_user", "rbd_secret_uuid", "max_vol_size"),
            *("error_extending", "error_deleting"),
            *("ephemeral_volume_type", "swap_volume_type", "cinder_img_volume_type"),
            *(each for each in vars(cinder_volume).values() if isinstance(each, str)),
        }
        assert told <= {*options, *others}, told - {*options, *others}


def test_flavor_keys_of_the_operators_pages_are_known() -> None:
    known = {*FLAVOR_KEYS, *QUOTA_KEYS}
    for page in pages("operator"):
        text = (DOC / page).read_text()
        for key in re.findall(r"--property ([a-z]+:\w+)=", text):
            assert key in known, (page, key)
        for key in re.findall(r"``(imagebackend:\w+)(?: = [^`]+)?``", text):
            assert key in known, (page, key)


def commands(page: str) -> Iterator[list[str]]:
    """Of the library, as a shell would run them."""
    for text in blocks(page, "console"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=False)
            if words[:2] in (["$", "imagebackend"], ["#", "imagebackend"]):
                yield words[2:]


def test_commands_of_the_operators_pages_are_right(host: HostUnderTest) -> None:
    flavors = host.path / "flavors.json"
    flavors.write_text("[]")
    seen = set()
    for page in pages("operator"):
        for words in commands(page):
            manager = Commands(NAMESPACE)
            command, name, rest = manager.find_command(words)
            parser = command(ImageBackendApp(), None).get_parser(name)
            rest = [str(flavors) if each == flavors.name else each for each in rest]
            parser.parse_args(rest)  # exits for what it does not know
            seen.add((page, name))
    assert {
        ("operator/cinder.rst", "config check"),
        ("operator/cinder.rst", "demo"),
        ("operator/stuck.rst", "recover"),
    } <= seen


def test_every_page_is_short_and_in_a_toctree() -> None:
    guides = ("user", "operator", "driver", "contributor")
    listed = {page for guide in guides for page in pages(guide)}
    for path in DOC.rglob("*.rst"):
        name = str(path.relative_to(DOC))
        assert len(path.read_text().splitlines()) <= 250, name
        assert path.name == "index.rst" or name in listed, name


def test_the_driver_authors_example_passes_the_kit(tmp_path: Path) -> None:
    folder = DOC / "driver"
    done = subprocess.run(
        [
            *(sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--rootdir", folder, f"--basetemp={tmp_path / 'kit'}"),
            folder / "example_test.py",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d{2} passed", done.stdout), done.stdout
