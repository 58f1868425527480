# SPDX-License-Identifier: Apache-2.0
"""What the commands share: the manager, checked columns, safe output, summaries."""

from __future__ import annotations

import abc
import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from cliff import command, lister, show

from imagebackend.cli import output

if TYPE_CHECKING:
    from imagebackend.cli.app import ImageBackendApp
    from imagebackend.manager import DiskManager
    from imagebackend.model import Change, Disk, DiskChange, Finding, Severity

#: Formatters whose own syntax escapes control characters.
_ESCAPING = ("json", "yaml")


class Command(command.Command):
    """A command that works with the disk manager."""

    app: ImageBackendApp
    _parser: argparse.ArgumentParser | None = None

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = self._parser = super().get_parser(prog_name)
        self.add_arguments(parser)
        # Without the formatters' options, which would hide the command's own.
        own = argparse.ArgumentParser(prog=prog_name, add_help=False)
        self.add_arguments(own)
        parser.usage = own.format_usage().partition(": ")[2].strip().replace("%", "%%")
        return parser

    def get_epilog(self) -> str:
        # cliff would read the metadata of all packages to name a plugin here.
        return self._epilog or ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's own arguments."""

    @property
    def manager(self) -> DiskManager:
        return self.app.manager

    def usage(self, message: str) -> NoReturn:
        """End as for any other misuse of the command."""
        assert self._parser is not None
        self._parser.error(message)


class _Display(Command):
    """A command with columns.

    :ivar summary: a line for people, once the command has done its work.
    :ivar code: the exit code.
    """

    COLUMNS: Sequence[str] = ()
    summary = ""
    code = 0

    def columns(self, _parsed_args: argparse.Namespace) -> Sequence[str]:
        return self.COLUMNS

    def run(self, parsed_args: argparse.Namespace) -> int:
        # cliff would notice only after the disks are made.
        names = self.columns(parsed_args)
        known = {_normal(name) for name in names}
        for name in parsed_args.columns:
            if _normal(name) not in known:
                self.usage(f"no column {name!r}: there are {', '.join(names)}")
        super().run(parsed_args)
        if self.summary and parsed_args.formatter == "table":
            self.app.note(self.summary)
        return self.code


class Lister(_Display, lister.Lister):
    """A command that prints rows, as they come where the formatter can."""

    #: Said instead of an empty table.
    EMPTY = ""

    @abc.abstractmethod
    def rows(self, parsed_args: argparse.Namespace) -> Iterable[Sequence[Any]]:
        """Do the work; the rows match :meth:`columns`."""

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[Sequence[str], Iterable[Sequence[Any]]]:
        return self.columns(parsed_args), self.rows(parsed_args)

    def produce_output(
        self,
        parsed_args: argparse.Namespace,
        column_names: Sequence[str],
        data: Iterable[Sequence[Any]],
    ) -> int:
        rows = (_safe(row, parsed_args.formatter) for row in data)
        first = list(itertools.islice(rows, 1))
        table = parsed_args.formatter == "table"
        if not first and table and not parsed_args.print_empty:
            if self.EMPTY:
                self.app.note(self.EMPTY)
            return 0
        return super().produce_output(
            parsed_args, column_names, itertools.chain(first, rows)
        )


class ShowOne(_Display, show.ShowOne):
    """A command that prints the facts of one thing."""

    @abc.abstractmethod
    def values(self, parsed_args: argparse.Namespace) -> Sequence[Any]:
        """Do the work; the values match :meth:`columns`."""

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[Sequence[str], Iterable[Any]]:
        values = self.values(parsed_args)
        return self.columns(parsed_args), _safe(values, parsed_args.formatter)


class FindingLister(Lister):
    """A command that prints findings; exit code 1 if one is an error.

    :ivar REMEDY: name of the last column.
    """

    REMEDY = "Advice"
    #: Whether findings of severity OK are printed.
    fine = True

    def columns(self, _parsed_args: argparse.Namespace) -> Sequence[str]:
        return ("Severity", "Subject", "What", self.REMEDY)

    @abc.abstractmethod
    def findings(self, parsed_args: argparse.Namespace) -> Iterable[Finding]:
        """Do the work."""

    def rows(self, parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        from imagebackend.model import Severity

        counts = dict.fromkeys(Severity, 0)
        for finding in self.findings(parsed_args):
            counts[finding.severity] += 1
            if finding.severity is Severity.ERROR:
                self.code = 1
            if finding.severity is Severity.OK and not self.fine:
                continue
            remedy = "; ".join(filter(None, (finding.action, finding.advice)))
            yield (str(finding.severity), finding.subject, finding.what, remedy)
        self.summary = self.conclusion(parsed_args, counts)

    def conclusion(
        self, _parsed_args: argparse.Namespace, counts: dict[Severity, int]
    ) -> str:
        """The summary, from the number of findings by severity."""
        from imagebackend.model import Severity

        return (
            f"{_count(counts[Severity.ERROR], 'error')}, "
            f"{_count(counts[Severity.WARNING], 'warning')}"
        )


class ChangeLister(Lister):
    """A command that changes an instance's disks and prints what came of each."""

    COLUMNS = ("Change", "Name", "Size", "Format", "Content", "Backend", "Disk ID")
    EMPTY = "nothing to do"

    @abc.abstractmethod
    def change(self, parsed_args: argparse.Namespace) -> Change:
        """Do the work."""

    def rows(self, parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        from imagebackend.model import Change

        instance_id = getattr(parsed_args, "instance", None)
        before = self._disks(instance_id)
        change = self.change(parsed_args)
        disks = before | self._disks(instance_id)
        said: list[str] = []
        for what, each in _each(change, before):
            disk = disks.get(each.disk_id)
            path = str(each.path or "")
            if what != "kept":
                said.append(_sentence(what, each, disk, before.get(each.disk_id)))
            yield (
                what,
                each.name,
                output.ListedSize(each.size or None),
                disk.format if disk else "",
                path,
                disk.backend if disk else "",
                each.disk_id,
            )
        if change != Change(change.instance_id):
            self.summary = "; ".join(said) or "nothing changed"

    def _disks(self, instance_id: str | None) -> dict[str, Disk]:
        if instance_id is None:
            return {}
        return {disk.id: disk for disk in self.manager.list(instance_id)}


def _each(change: Change, before: dict[str, Disk]) -> Iterator[tuple[str, DiskChange]]:
    for what in ("created", "recreated", "kept", "detached", "deleted"):
        for each in getattr(change, what):
            former = before.get(each.disk_id)
            if what == "kept" and former is not None and each.size > former.size:
                yield "grown", each
            else:
                yield what, each


def _sentence(
    what: str, each: DiskChange, disk: Disk | None, before: Disk | None
) -> str:
    facts = ", ".join(filter(None, (disk.format if disk else "", each.path)))
    verb = "grew" if what == "grown" else what
    text = f"{verb} {each.name}" + (f" ({facts})" if facts else "")
    if what == "grown" and before is not None:
        return f"{text}, {output.size(before.size)} -> {output.size(each.size)}"
    return text + (f", {output.size(each.size)}" if each.size else "")


def _safe(row: Iterable[Any], formatter: str) -> list[Any]:
    if formatter in _ESCAPING:
        return list(row)
    if formatter == "table":
        row = ("" if cell is None else cell for cell in row)
    return [output.escape(cell) if isinstance(cell, str) else cell for cell in row]


def _normal(column: str) -> str:
    """As cliff compares names of columns."""
    return column.lower().strip().replace(" ", "_")


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}" + ("" if number == 1 else "s")
