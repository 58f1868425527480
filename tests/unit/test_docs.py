# SPDX-License-Identifier: Apache-2.0
"""The guides say what the code does: their examples run, their tables are complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebackend import DiskManager
from imagebackend import exceptions as exc
from imagebackend.validation import FLAVOR_KEYS, QUOTA_KEYS
from tests.conftest import HostUnderTest
from tests.unit.test_model import errors

DOC = Path(__file__).parents[2] / "doc" / "source"
BLOCK = re.compile(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", re.MULTILINE)


def blocks(*pages: str) -> Iterator[tuple[str, str]]:
    for page in pages:
        for body in BLOCK.findall((DOC / page).read_text()):
            yield page, re.sub("^   ", "", body, flags=re.MULTILINE)


def test_the_user_guides_examples_run_one_after_the_other(
    host: HostUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.raw_image("cirros")
    monkeypatch.chdir(host.path)
    names: dict[str, object] = {}
    pages = ("user/index.rst", "user/verbs.rst", "user/guests.rst", "user/errors.rst")
    done = set()
    for page, code in blocks(*pages):
        exec(compile(code, page, "exec"), names)
        done.add(page)
    assert done == set(pages)
    manager = names["manager"]
    assert isinstance(manager, DiskManager)
    manager.close()


def test_the_table_of_codes_is_complete() -> None:
    text = (DOC / "user/errors.rst").read_text()
    told = re.findall(r"^``([a-z-]+)``  ", text, re.MULTILINE)
    assert told == [each.code for each in sorted_errors()]


def sorted_errors() -> list[type[exc.ImageBackendError]]:
    return list(errors())


def test_the_table_of_flavor_keys_is_complete() -> None:
    text = (DOC / "operator/flavors.rst").read_text()
    told = re.findall(r"^``((?:imagebackend|quota):[a-z_]+)``", text, re.MULTILINE)
    assert set(told) == {*FLAVOR_KEYS, *QUOTA_KEYS}


def test_every_verb_is_told_of() -> None:
    text = "".join(path.read_text() for path in (DOC / "user").glob("*.rst"))
    verbs = {name for name in vars(DiskManager) if not name.startswith("_")}
    operators = {"host_id", "backends", "check", "upgrade_store", "cache_entries"}
    untold = {verb for verb in verbs - operators if f"``{verb}``" not in text}
    untold -= {verb for verb in untold if f"manager.{verb}(" in text}
    assert untold <= {"close", "forget_host"}


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
