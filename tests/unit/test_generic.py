# SPDX-License-Identifier: Apache-2.0
"""What several backends share: here, files on top of files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from imagebackend import exceptions as exc
from imagebackend.backends.generic import qcow2_chain
from imagebackend.model import FileSource


def made(path: Path, *words: str, size: str = "1M") -> str:
    """A qcow2 file, of its own size or of what it is based on."""
    sized = [] if "-b" in words and "-u" not in words else [size]
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *words, path, *sized], check=True
    )
    return str(path)


def test_a_chain_is_told_by_the_headers_down_to_a_raw_file(tmp_path: Path) -> None:
    base = tmp_path / "volume"
    # Whatever a guest wrote there is no header.
    made(base, size="77M")
    middle = made(tmp_path / "volume.one", "-b", str(base), "-F", "raw")
    top = made(tmp_path / "volume.two", "-b", "volume.one", "-F", "qcow2")
    assert qcow2_chain(top) == FileSource(
        top, "qcow2", FileSource(middle, "qcow2", FileSource(str(base), "raw"))
    )
    alone = made(tmp_path / "alone")
    assert qcow2_chain(alone) == FileSource(alone, "qcow2")


def test_a_chain_that_would_have_to_be_guessed_is_refused(tmp_path: Path) -> None:
    vmdk = tmp_path / "other.vmdk"
    subprocess.run(["qemu-img", "create", "-q", "-f", "vmdk", vmdk, "1M"], check=True)
    top = made(tmp_path / "top", "-b", str(vmdk), "-F", "vmdk")
    with pytest.raises(exc.IntegrityError, match="'vmdk'"):
        qcow2_chain(top)
    loop = made(tmp_path / "loop", "-u", "-b", "loop", "-F", "qcow2")
    with pytest.raises(exc.IntegrityError, match="another file"):
        qcow2_chain(loop)
    silent = made(tmp_path / "silent", "-u", "-b", "base", "-F", "qcow2")
    data = Path(silent).read_bytes()
    Path(silent).write_bytes(data.replace(b"\xe2\x79\x2a\xca", b"\xe2\x79\x2a\xcb", 1))
    with pytest.raises(exc.IntegrityError, match="of format ''"):
        qcow2_chain(silent)
    raw = tmp_path / "raw"
    raw.write_bytes(bytes(4096))
    with pytest.raises(exc.IntegrityError, match="no qcow2 file"):
        qcow2_chain(str(raw))


def test_a_name_elsewhere_is_looked_for_in_the_same_folder_alone(
    tmp_path: Path,
) -> None:
    top = made(tmp_path / "top", "-u", "-b", "/etc/shadow", "-F", "raw")
    assert qcow2_chain(top).backing == FileSource(str(tmp_path / "shadow"), "raw")
