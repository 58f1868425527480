# SPDX-License-Identifier: Apache-2.0
"""The installed command as a process: speed, terminals, pipes, signals, guests."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GiB, HostUnderTest, MiB

#: As the console script does.
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from imagebackend.cli.entry import main; sys.exit(main())",
]
INSTANCE = "5bd1c6c2-6c5c-4b0e-8c55-6b6f4d0d7a11"


@pytest.fixture
def argv(host: HostUnderTest) -> list[str]:
    return [*COMMAND, "--config-file", str(host.config_file)]


def run(argv: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*argv, *more], capture_output=True, text=True)


def of_json(argv: list[str], *more: str) -> Any:
    done = run(argv, *more, "-f", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def on_terminal(argv: list[str], interrupt_at: str = "") -> tuple[int, str]:
    """Exit code and all that a terminal of 80 columns got to see.

    :param interrupt_at: Ctrl-C is pressed once this was seen.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(argv[0], argv)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while data := os.read(terminal, 65536):
            seen += data
            if interrupt_at and interrupt_at.encode() in seen:
                os.write(terminal, b"\x03")
                interrupt_at = ""
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), seen.decode()


def big_image(host: HostUnderTest, size: int = 512 * MiB) -> None:
    with (host.images / "big.raw").open("wb") as file:
        for _ in range(size // (16 * MiB)):
            file.write(os.urandom(16 * MiB))


def test_console_script_is_installed() -> None:
    script = shutil.which("imagebackend", path=str(Path(sys.executable).parent))
    assert script is not None
    done = run([script], "--version")
    assert done.returncode == 0 and done.stdout.startswith("imagebackend ")


def test_help_comes_at_once_and_needs_no_library() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert run(COMMAND, "--help").returncode == 0
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 0.6
    loaded = run(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from imagebackend.cli.app import main\n"
            "main(['--help'])\n"
            "print(sorted(sys.modules))",
        ]
    ).stdout.splitlines()[-1]
    for module in ("sqlalchemy", "oslo_log.log", "oslo_config.cfg", "cmd2"):
        assert f"'{module}'" not in loaded
    assert "'imagebackend.manager'" not in loaded


def test_reader_that_leaves_early_gets_no_traceback(argv: list[str]) -> None:
    process = subprocess.Popen(
        [*argv, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == ""


def test_full_output_is_one_line(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*argv, "disk", "list", "-f", "json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "imagebackend: No space left on device\n"


@pytest.mark.parametrize("closed", ["1", "2", "0"])
def test_a_stream_that_is_closed_hinders_nothing(
    host: HostUnderTest, argv: list[str], closed: str
) -> None:
    host.raw_image()
    command = [*argv, "disk", "create", INSTANCE, "--image", "raw-image"]
    script = f'exec {closed}>&-; exec "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr + done.stdout
    assert len(of_json(argv, "disk", "list")) == 1
    assert run(argv, "audit").returncode == 0


def test_an_encoding_that_lacks_a_letter_is_no_error(
    host: HostUnderTest, tmp_path: Path
) -> None:
    folder = tmp_path / "é"
    file = tmp_path / "é.conf"
    file.write_text(f"[imagebackend]\nstate_path = {folder}\n", encoding="utf-8")
    argv = [*COMMAND, "--config-file", str(file)]
    create = ("disk", "create", INSTANCE, "--disk", "name=root,role=root,size=1M")
    for command in (("config", "check"), create, ("disk", "xml", INSTANCE)):
        done = subprocess.run(
            [*argv, *command],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/&#233;/" in done.stdout


def test_a_configuration_file_that_is_no_text_is_named(host: HostUnderTest) -> None:
    host.config_file.write_bytes(b"[imagebackend]\nstate_path = \xff\n")
    done = run([*COMMAND, "--config-file", str(host.config_file)], "disk", "list")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert str(host.config_file) in done.stderr and "UTF-8" in done.stderr
    assert "internal" not in done.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_undoes_what_was_begun(
    host: HostUnderTest, argv: list[str], name: str
) -> None:
    big_image(host)
    process = subprocess.Popen(
        [*argv, "disk", "create", INSTANCE, "--image", "big", "--root-gb", "1"],
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests may have had it ignored, as nohup has.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    fetched = host.path / "cache" / "tmp"
    while process.poll() is None and not list(fetched.glob("*")):
        time.sleep(0.01)
    number = getattr(signal, name)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number
    assert said == "imagebackend: interrupted\n"
    assert of_json(argv, "disk", "list") == [] and of_json(argv, "recover") == []
    assert host.files() == [] and not list(fetched.glob("*"))


def test_a_signal_at_any_moment_is_one_line(argv: list[str]) -> None:
    """While modules are imported, and while the process ends, too."""
    # From when the interpreter has read the few lines that catch one.
    marker = "import imagebackend.cli.entry; print('go', flush=True); "
    command = [argv[0], argv[1], marker + argv[2], *argv[3:], "disk", "list"]
    for step in range(24):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.03 + step / 40)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode in (0, 130), said
        assert "Traceback" not in said
        last = "interrupted" if process.returncode else "no disks are recorded"
        assert said.endswith(f"{last}\n")


def test_what_is_told_to_ignore_hangups_does(
    host: HostUnderTest, argv: list[str]
) -> None:
    big_image(host)
    process = subprocess.Popen(["nohup", *argv, "cache", "prefetch", "big"])
    fetched = host.path / "cache" / "tmp"
    while process.poll() is None and not list(fetched.glob("*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0


def test_progress_is_drawn_and_erased(host: HostUnderTest, argv: list[str]) -> None:
    big_image(host)
    code, seen = on_terminal([*argv, "cache", "prefetch", "big"])
    assert code == 0
    pieces = seen.split("\r")
    drawn = [number for number, piece in enumerate(pieces) if "fetch" in piece]
    assert drawn and all(len(pieces[number]) < 80 for number in drawn)
    assert pieces[drawn[-1] + 1].strip() == ""


def test_progress_is_not_for_pipes(host: HostUnderTest, argv: list[str]) -> None:
    big_image(host, 64 * MiB)
    done = run(argv, "cache", "prefetch", "big")
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_leaves_nothing(host: HostUnderTest, argv: list[str]) -> None:
    big_image(host)
    command = [*argv, "disk", "create", INSTANCE, "--image", "big", "--root-gb", "1"]
    code, seen = on_terminal(command, interrupt_at="fetch image [")
    assert code == 130
    assert seen.endswith("imagebackend: interrupted\r\n")
    assert "Traceback" not in seen
    assert host.files() == []
    assert of_json(argv, "disk", "list") == []
    assert of_json(argv, "recover") == []


def test_killed_command_is_recovered(host: HostUnderTest, argv: list[str]) -> None:
    big_image(host)
    process = subprocess.Popen(
        [*argv, "disk", "create", INSTANCE, "--image", "big", "--root-gb", "1"]
    )
    fetched = host.path / "cache" / "tmp"
    while process.poll() is None and not list(fetched.glob("*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert run(argv, "audit").returncode == 1
    assert "--apply" in run(argv, "recover").stderr
    assert len(of_json(argv, "disk", "list")) == 1
    assert run(argv, "recover", "--apply").returncode == 0
    assert of_json(argv, "disk", "list") == []
    assert run(argv, "audit").returncode == 0


# --- a running guest ----------------------------------------------------------


@pytest.fixture
def guest(host: HostUnderTest, argv: list[str]) -> Iterator[str]:
    """A domain that runs on the disks of the command; returns its uuid."""
    import libvirt

    uri = host.conf.imagebackend_libvirt.uri
    libvirt.registerErrorHandler(lambda *_: None, None)
    connection = libvirt.open(uri)
    # QEMU runs as another user.
    for folder in (host.path, *host.path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    host.raw_image()
    instance = str(uuid.uuid4())
    flavor = ("--image", "raw-image", "--root-gb", "1")
    assert run(argv, "disk", "create", instance, *flavor).returncode == 0
    disks = run(argv, "disk", "xml", instance).stdout
    domain = connection.createXML(
        f"<domain type='qemu'><name>{instance}</name><uuid>{instance}</uuid>"
        f"<memory unit='MiB'>64</memory><os><type>hvm</type></os>"
        f"<devices>{disks}</devices></domain>"
    )
    try:
        yield instance
    finally:
        domain.destroy()
        connection.close()


def test_running_guest_grows_and_holds_its_disks(guest: str, argv: list[str]) -> None:
    grow = ("disk", "resize", guest, "--root-gb", "2")
    for command in (grow, ("disk", "delete", guest)):
        refused = run(argv, *command)
        assert refused.returncode == 1
        assert refused.stderr.startswith("imagebackend: ")
        assert refused.stderr.count("\n") == 1
    (grown,) = of_json(argv, *grow, "--running")
    assert (grown["Change"], grown["Size"]) == ("grown", 2 * GiB)


def test_running_guest_is_kept_as_an_image(
    guest: str, host: HostUnderTest, argv: list[str]
) -> None:
    made = of_json(argv, "disk", "snapshot", guest, "copy", "--running")
    assert (host.images / "copy.qcow2").stat().st_size == made["Size"] > MiB


def test_guest_that_does_not_run_is_one_line(guest: str, argv: list[str]) -> None:
    missing = str(uuid.uuid4())
    command = ("disk", "create", missing, "--disk", "name=root,role=root,size=1M")
    assert run(argv, *command).returncode == 0
    done = run(argv, "disk", "snapshot", missing, "copy", "--running")
    assert done.returncode == 1
    assert done.stderr.startswith("imagebackend: ") and done.stderr.count("\n") == 1
