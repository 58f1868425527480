# SPDX-License-Identifier: Apache-2.0
"""The guides say what the code does: their examples run, their tables are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import imagebackend
from imagebackend import DiskManager
from imagebackend import exceptions as exc
from imagebackend.backends.qcow2 import Qcow2Backend
from imagebackend.backends.raw import RawBackend
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


def test_the_table_of_capabilities_is_true(host: HostUnderTest) -> None:
    from imagebackend.backends.ceph_rbd import RbdBackend

    text = (DOC / "driver/capabilities.rst").read_text()
    lines = text[text.index("capability  ") :].split("\n\n")[0].splitlines()
    cells = [line.split(None, 3) for line in lines if line[0] != "="]
    assert cells[0] == ["capability", "qcow2", "raw", "rbd"]
    gen = Generation("g", "d", "root", None, "", "", "b", "folder:new", 0, "raw")
    found = [
        driver("b", host.conf, "").capabilities(gen)
        for driver in (Qcow2Backend, RawBackend, RbdBackend)
    ]
    told = {name: values for name, *values in cells[1:]}
    assert told == {
        field.name: [shown(getattr(each, field.name)) for each in found]
        for field in dataclasses.fields(Capabilities)
        # That one is what the operator wants.
        if field.name != "in_place"
    }


def test_the_table_of_features_is_true(host: HostUnderTest) -> None:
    from imagebackend.backends.ceph_rbd import RbdBackend

    text = (DOC / "operator/features.rst").read_text()
    lines = text[text.index("feature  ") :].split("\n\n")[0].splitlines()
    told = [re.split(r"  +", line) for line in lines if line[0] != "="]
    drivers = {"qcow2": Qcow2Backend, "raw": RawBackend, "rbd": RbdBackend}
    assert told[0] == ["feature", *drivers]
    gen = Generation("g", "d", "root", None, "", "", "b", "folder:new", 0, "raw")
    able = [driver("b", host.conf, "").capabilities(gen) for driver in drivers.values()]
    classes = drivers.values()
    assert told[1:] == [
        ["grow a running guest's disk", *(shown(each.live_resize) for each in able)],
        ["snapshot of a running guest", *(shown(each.live_snapshot) for each in able)],
        ["shareable disks", *(shown(each.shareable) for each in able)],
        [
            "clone an image where it lies",
            *(shown(driver.CLONES_IMAGES) for driver in classes),
        ],
        ["flatten", *(shown(each.flatten) for each in able)],
        [
            "pools",
            *(
                shown("pools" in [option.dest for option in driver.OPTIONS])
                for driver in classes
            ),
        ],
        ["volume types", *(shown(driver.VOLUME_TYPES) for driver in classes)],
    ]


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


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
