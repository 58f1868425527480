# SPDX-License-Identifier: Apache-2.0
"""The command: parts are started with what they need, independent ones at once."""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bed.bed import Bed, BedError, Part
from bed.ceph import Ceph
from bed.cinder import Cinder
from bed.databases import MariaDB, PostgreSQL
from bed.glance import Glance
from bed.keystone import Keystone
from bed.rabbitmq import RabbitMQ
from bed.services import Services

#: In the order in which they are listed; the last is stopped first.
PARTS: tuple[type[Part], ...] = (
    Ceph,
    MariaDB,
    PostgreSQL,
    RabbitMQ,
    Services,
    Keystone,
    Glance,
    Cinder,
)

_ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    args = _arguments()
    bed = Bed(Path(args.folder).resolve())
    parts = {part.name: part(bed) for part in PARTS}
    unknown = [name for name in getattr(args, "parts", []) if name not in parts]
    if unknown:
        print(
            f"testbed: no part {', '.join(unknown)}: there are {', '.join(parts)}",
            file=sys.stderr,
        )
        return 2
    try:
        return _COMMANDS[args.command](bed, parts, args)
    except BedError as error:
        bed.say(str(error))
        return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/testbed",
        description="Real storages and services for the tests, as plain processes "
        f"under one folder, bound to loopback. Parts: "
        f"{', '.join(part.name for part in PARTS)}.",
    )
    parser.add_argument(
        "--folder",
        default=os.environ.get("IMAGEBACKEND_TESTBED", _ROOT / ".testbed" / "bed"),
        help="where all of it lives (default: .testbed/bed of this tree)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    up = add("up", "start parts and what they need; all without a name")
    up.add_argument("parts", nargs="*", metavar="PART")
    down = add("down", "stop parts and what needs them; all without a name")
    down.add_argument("parts", nargs="*", metavar="PART")
    down.add_argument("--wipe", action="store_true", help="remove their data too")
    add("status", "what runs, and where; exit 1 if nothing does")
    add("env", "print what a shell needs: eval $(tools/testbed env)")
    run = add(
        "run", "up, a command with that environment, and down of what was started"
    )
    run.add_argument(
        "--part", dest="parts", action="append", default=[], help="only these"
    )
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND …")
    return parser.parse_args()


# --- commands --------------------------------------------------------------------


def _up(bed: Bed, parts: dict[str, Part], args: argparse.Namespace) -> int:
    _start(bed, parts, args.parts or list(parts))
    return 0


def _down(bed: Bed, parts: dict[str, Part], args: argparse.Namespace) -> int:
    names = _with_needing(parts, args.parts or list(parts))
    for name in reversed(names):
        parts[name].down()
        if args.wipe:
            shutil.rmtree(parts[name].folder, ignore_errors=True)
    if args.wipe and not args.parts:
        shutil.rmtree(bed.folder, ignore_errors=True)
    return 0


def _status(bed: Bed, parts: dict[str, Part], _args: argparse.Namespace) -> int:
    up = False
    for part in parts.values():
        if part.running():
            up = up or bool(part.processes)
            memory = sum(_memory(bed, each) for each in part.processes)
            print(f"{part.name:<12}{memory >> 20:>6} MiB  {part.where()}")
        else:
            dead = [each for each in part.processes if bed.pid(each) is None]
            why = f"does not run ({', '.join(dead)})" if dead else "is not installed"
            print(f"{part.name:<12}{'':>10}  {why}")
    return 0 if up else 1


def _env(bed: Bed, parts: dict[str, Part], _args: argparse.Namespace) -> int:
    for key, value in _environment(bed, parts).items():
        print(f"export {key}={shlex.quote(value)}")
    return 0


def _run(bed: Bed, parts: dict[str, Part], args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        bed.say("run what?")
        return 2
    wanted = args.parts or list(parts)
    ours = [name for name in _with_needs(parts, wanted) if not parts[name].running()]
    try:
        _start(bed, parts, wanted)
        child = subprocess.Popen(words, env={**os.environ, **_environment(bed, parts)})
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _frame: child.send_signal(number))
        signal.signal(signal.SIGINT, lambda *_: None)  # the child has it too
        code = child.wait()
        return code if code >= 0 else 128 - code
    finally:
        for name in reversed(ours):
            parts[name].down()


_COMMANDS = {"up": _up, "down": _down, "status": _status, "env": _env, "run": _run}


# --- help ------------------------------------------------------------------------


def _start(bed: Bed, parts: dict[str, Part], names: Sequence[str]) -> None:
    wanted = _with_needs(parts, names)
    lacking = {name: lack for name in wanted if (lack := parts[name].missing())}
    if lacking:
        raise BedError(
            "not installed: "
            + "; ".join(f"{', '.join(lack)} ({name})" for name, lack in lacking.items())
            + ": tools/bootstrap installs it"
        )
    bed.make()
    futures: dict[str, concurrent.futures.Future[None]] = {}

    def start(name: str) -> None:
        part = parts[name]
        for need in part.needs_to_prepare:
            futures[need].result()
        part.prepare()
        for need in part.needs:
            futures[need].result()
        since = time.monotonic()
        part.up()
        bed.say(f"{name} is up ({time.monotonic() - since:.1f} s)")

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        for name in wanted:
            futures[name] = pool.submit(start, name)
    for name in wanted:
        error = futures[name].exception()
        if error is not None:
            raise BedError(f"{name}: {error}") from error


def _with_needs(parts: dict[str, Part], names: Sequence[str]) -> list[str]:
    found: set[str] = set()

    def add(name: str) -> None:
        found.add(name)
        for need in parts[name].needs:
            add(need)

    for name in names:
        add(name)
    return [name for name in parts if name in found]


def _with_needing(parts: dict[str, Part], names: Sequence[str]) -> list[str]:
    return [name for name in parts if set(_with_needs(parts, [name])) & set(names)]


def _environment(bed: Bed, parts: dict[str, Part]) -> dict[str, str]:
    found = {"IMAGEBACKEND_TESTBED": str(bed.folder)}
    for part in parts.values():
        if part.running():
            found |= part.env()
    return found


def _memory(bed: Bed, name: str) -> int:
    """Resident bytes of a process and its children's group."""
    leader = bed.pid(name)
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == leader:
            total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total
