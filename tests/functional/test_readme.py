# SPDX-License-Identifier: Apache-2.0
"""The README's blocks are what they say: taken out of it and run."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^\.\. code-block:: (\w+)\n\n((?:   .*\n|\n)+)", re.MULTILINE)


def blocks() -> list[tuple[str, str]]:
    text = (ROOT / "README.rst").read_text()
    return [
        (kind, re.sub("^   ", "", body, flags=re.MULTILINE).strip())
        for kind, body in BLOCK.findall(text)
    ]


def test_the_make_commands_are_targets() -> None:
    commands = [body for kind, body in blocks() if kind == "sh" and "make" in body]
    commands = [body for body in commands if body.startswith("make ")]
    assert commands == ["make demo", "make test"]
    for command in commands:
        subprocess.run([*command.split(), "-n"], cwd=ROOT, check=True, stdout=-3)


@pytest.mark.timeout(300)
def test_the_blocks_run_in_order_as_a_newcomer_would_run_them(tmp_path: Path) -> None:
    guest = os.environ.get("IMAGEBACKEND_GUEST_IMAGE")
    assert guest, "make test sets IMAGEBACKEND_GUEST_IMAGE"
    (tmp_path / ".testbed").mkdir()
    (tmp_path / ".testbed" / "guest.qcow2").symlink_to(guest)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    outputs = []
    for kind, body in blocks():
        if kind not in ("sh", "python") or body.startswith("make "):
            continue
        interpreter = ["sh", "-eu"] if kind == "sh" else [sys.executable, "-W", "error"]
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        }
        done = subprocess.run(
            interpreter,
            input=body,
            text=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
        )
        assert done.returncode == 0, f"{body}\n{done.stdout}{done.stderr}"
        outputs.append(done.stdout)
    _, python, command = outputs
    assert "made: ['root', 'swap', 'data']" in python
    assert python.count("<disk ") == 3
    assert (tmp_path / "state" / "images" / "my-snapshot.qcow2").exists()
    assert "kept" in command or "data" in command


def test_the_configuration_can_be_read() -> None:
    (body,) = [body for kind, body in blocks() if kind == "ini"]
    parser = configparser.ConfigParser()
    parser.read_string(body)
    names = [
        name.strip() for name in parser["imagebackend"]["enabled_backends"].split(",")
    ]
    assert set(names) <= set(parser.sections())
    assert parser["imagebackend"]["default_backend"] in names
    for name in names:
        assert set(parser[name]) == {"driver", "instances_path"}
