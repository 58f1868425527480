# SPDX-License-Identifier: Apache-2.0
"""What every part of the bed stands on: its folder, its ports, its processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BedError(Exception):
    """Something that the one who started the bed must know."""


class Bed:
    """A folder with the state of all parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.log = folder / "log"
        self._ports_file = folder / "ports.json"
        self._secrets_file = folder / "secrets.json"
        self._lock = threading.Lock()

    def make(self) -> None:
        for each in (self.folder, self.run, self.log):
            each.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        print(f"testbed: {text}", file=sys.stderr, flush=True)

    # --- ports ---------------------------------------------------------------

    def port(self, name: str) -> int:
        """A port of the loopback address, free when it is first asked for, and the
        same from then on."""
        with self._lock:
            ports = _read(self._ports_file)
            if name not in ports:
                ports[name] = _free_port(set(ports.values()))
                self._ports_file.write_text(json.dumps(ports, indent=1))
            number: int = ports[name]
            return number

    def secret(self, name: str) -> str:
        """A password, made when it is first asked for, and the same from then on."""
        with self._lock:
            known = _read(self._secrets_file)
            if name not in known:
                known[name] = secrets.token_hex(16)
                self._secrets_file.touch(0o600)
                self._secrets_file.write_text(json.dumps(known, indent=1))
            word: str = known[name]
            return word

    # --- processes -------------------------------------------------------------

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        ports: Sequence[str] = (),
    ) -> None:
        """Start a process in a session of its own, unless it runs already.

        :param ports: names of those that it will listen on.
        """
        if self.pid(name) is not None:
            return
        for each in ports:
            number = self.port(each)
            if _answers(number):
                raise BedError(
                    f"port {number} of {LOOPBACK}, which {name} had before, is taken "
                    f"now: free it, or remove {self._ports_file} and the bed's data "
                    f"(tools/testbed down --wipe)"
                )
        with open(self.log / f"{name}.out", "ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**clean_environment(), **(env or {})},
                start_new_session=True,
                cwd=self.folder,
            )
        # A process number may come back; with its start it is unique.
        self._pid_file(name).write_text(f"{process.pid} {_started(process.pid)}\n")
        # Reaped, so that one that died is seen to be dead.
        threading.Thread(target=process.wait, daemon=True).start()

    def pid(self, name: str) -> int | None:
        """Of the process that runs under that name."""
        try:
            pid, started = self._pid_file(name).read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if _started(int(pid)) == started else None

    def signal(self, name: str, number: int) -> None:
        pid = self.pid(name)
        if pid is None:
            raise BedError(f"{name} does not run")
        os.kill(pid, number)

    def stop(self, *names: str, patience: float = 6) -> None:
        """TERM to each; after ``patience`` seconds KILL to what is left of it."""
        pids = {name: pid for name in names if (pid := self.pid(name)) is not None}
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            _wait(lambda: not any(map(self.pid, pids)), patience)
        for pid in pids.values():
            # The group: workers may outlive their master.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for name in names:
            self._pid_file(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.run.glob("*.pid"))

    def _pid_file(self, name: str) -> Path:
        return self.run / f"{name}.pid"

    # --- waiting and running -----------------------------------------------------

    def wait(self, name: str, ready: Callable[[], object], limit: float = 60) -> None:
        """Until ``ready()`` is true; an exception of it counts as not yet.

        :raises BedError: the process died, or it took too long.
        """
        last: list[Exception] = []

        def look() -> bool:
            if self.pid(name) is None:
                raise BedError(f"{name} died: {self.tail(name)}")
            try:
                return bool(ready())
            except (BedError, OSError, ValueError, subprocess.SubprocessError) as error:
                last[:] = [error]
                return False

        try:
            _wait(look, limit)
        except TimeoutError:
            why = f" ({last[0]})" if last else ""
            raise BedError(
                f"{name} is not ready after {limit:g} s{why}: {self.tail(name)}"
            ) from None

    def listens(self, port: str) -> Callable[[], bool]:
        number = self.port(port)
        return lambda: _answers(number)

    def tail(self, name: str) -> str:
        """The end of what a process said."""
        try:
            lines = (self.log / f"{name}.out").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        said = " | ".join(lines[-5:]) or "it said nothing"
        return f"{said} ({self.log}/{name}.out)"

    def call(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        text: str | None = None,
        limit: float = 120,
    ) -> str:
        """Run a command to its end; what it printed.

        :raises BedError: it failed.
        """
        try:
            done = subprocess.run(
                [str(word) for word in command],
                env={**clean_environment(), **(env or {})},
                input=text,
                capture_output=True,
                text=True,
                timeout=limit,
                cwd=self.folder,
                check=False,
            )
        except FileNotFoundError:
            raise BedError(f"{command[0]} is not installed (bindep.txt)") from None
        except subprocess.TimeoutExpired:
            raise BedError(f"{command[0]} took more than {limit:g} s") from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise BedError(
                f"{' '.join(map(str, command[:4]))} failed: {' | '.join(said[-4:])}"
            )
        return done.stdout


class Part:
    """One thing that can be started alone, with what it needs."""

    name: str
    needs: tuple[str, ...] = ()
    #: The ones of them that prepare() waits for.
    needs_to_prepare: tuple[str, ...] = ()
    #: Programs that must be installed for it.
    programs: tuple[str, ...] = ()
    #: The names of its processes, in the order in which they are stopped.
    processes: tuple[str, ...] = ()

    def __init__(self, bed: Bed) -> None:
        self.bed = bed

    @property
    def folder(self) -> Path:
        return self.bed.folder / self.name

    def missing(self) -> list[str]:
        path = f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
        return [each for each in self.programs if not shutil.which(each, path=path)]

    def prepare(self) -> None:
        """What can be done before all that it needs is there."""

    def up(self) -> None:
        """Make what is not there yet, start what does not run, wait until it works."""
        raise NotImplementedError

    def down(self) -> None:
        self.bed.stop(*self.processes)

    def running(self) -> bool:
        return all(self.bed.pid(each) is not None for each in self.processes)

    def where(self) -> str:
        """For a person: how it is reached."""
        raise NotImplementedError

    def env(self) -> dict[str, str]:
        """What a shell needs to reach it."""
        return {}


def clean_environment() -> dict[str, str]:
    """Nothing of the caller's shell but what every program needs."""
    keep = ("HOME", "TERM", "TMPDIR", "USER", "LOGNAME")
    return {
        **{key: os.environ[key] for key in keep if key in os.environ},
        "PATH": _SYSTEM_PATH,
        "LC_ALL": "C.UTF-8",
    }


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None: it is not there, or dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return found


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((LOOPBACK, port)) == 0


def _free_port(taken: set[int]) -> int:
    # Below the kernel's own range, so that no outgoing connection takes it.
    first = 20000 + os.getpid() % 10000
    for number in range(first, first + 2000):
        if number in taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, number))
            except OSError:
                continue
            return number
    raise BedError("no free port")


def _wait(ready: Callable[[], bool], limit: float) -> None:
    end = time.monotonic() + limit
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.05)
