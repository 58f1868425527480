# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure: a host in a folder, interleaved runs, ratios."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oslo_config import cfg

import imagebackend.conf
from imagebackend import DiskManager, Flavor, Instance


@dataclass
class Result:
    """One line of the table.

    :ivar bare: what the other side ran, or what the limit is of.
    :ivar ours: seconds, or what ``unit`` says.
    :ivar limit: None: there only to compare.
    """

    name: str
    bare: str
    ours: float
    theirs: float | None
    limit: float | None
    unit: str = "s"

    @property
    def value(self) -> float:
        """What is held against the limit: the ratio where there are two sides."""
        return self.ours / self.theirs if self.theirs else self.ours

    @property
    def within(self) -> bool:
        return self.limit is None or self.value <= self.limit

    def line(self) -> str:
        sides = f"{_number(self.ours, self.unit):>12}"
        sides += f"{_number(self.theirs, self.unit) if self.theirs else '-':>12}"
        limit = "-"
        if self.limit is not None:
            limit = f"{self.limit:g}" + ("x" if self.theirs else f" {self.unit}")
        value = f"{self.value:.2f}x" if self.theirs else ""
        verdict = "ok" if self.within else "OVER THE LIMIT"
        if self.limit is None:
            verdict = "to compare"
        return f"{self.name:24}{sides}{value:>8}{limit:>12}  {verdict}"


class BenchHost:
    """A host in a folder of its own."""

    def __init__(self, folder: Path, settings: str = "") -> None:
        self.folder = folder
        (folder / "images").mkdir(parents=True, exist_ok=True)
        self.config_file = folder / "imagebackend.conf"
        self.config_file.write_text(
            f"[imagebackend]\nstate_path = {folder}\n{settings}"
        )
        self.conf = configuration(self.config_file)

    def manager(self) -> DiskManager:
        return DiskManager(self.conf)

    def image(self, name: str, size: int) -> Path:
        """A raw image of random bytes, with its digest beside it."""
        import hashlib

        path = self.folder / "images" / f"{name}.raw"
        hasher = hashlib.sha512()
        with path.open("wb") as file:
            for _ in range(size >> 20):
                block = os.urandom(1 << 20)
                hasher.update(block)
                file.write(block)
            os.fsync(file.fileno())
        notes = {"digest": f"sha512:{hasher.hexdigest()}"}
        path.with_suffix(".json").write_text(json.dumps(notes))
        return path


def configuration(path: Path | str) -> cfg.ConfigOpts:
    conf = cfg.ConfigOpts()
    imagebackend.conf.register(conf)
    conf(["--config-file", str(path)], project="imagebackend")
    return conf


def instance(image: str | None = "image", instance_id: str | None = None) -> Instance:
    flavor = Flavor("small", root_gb=2)
    return Instance(instance_id or str(uuid.uuid4()), "project", image, flavor)


def interleaved(
    ours: Callable[[], float], theirs: Callable[[], float], runs: int
) -> tuple[float, float]:
    """Medians of both sides, run in turns, so that both see the same machine."""
    mine, bare = [], []
    for number in range(runs):
        for side, times in ((ours, mine), (theirs, bare))[:: 1 if number % 2 else -1]:
            times.append(side())
    return statistics.median(mine), statistics.median(bare)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def child(case: str, *args: str) -> dict[str, float]:
    """A case's part in a process of its own; what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.child", case, *args],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
    return f"{value:g} {unit}"
