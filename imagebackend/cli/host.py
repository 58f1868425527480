# SPDX-License-Identifier: Apache-2.0
"""What concerns this host as a whole: room, checks, recovery, the store."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from imagebackend.cli import base, output
from imagebackend.cli.arguments import flavors_file

if TYPE_CHECKING:
    from imagebackend.model import Finding, Severity


class Capacity(base.Lister):
    """Show the room in each storage and what the cache takes.

    A storage with the same provider on several hosts is one storage: count it once.
    """

    COLUMNS = ("Backend", "What", "Total", "Free", "Used By Us", "Provider")

    def rows(self, _parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        for room in self.manager.capacity():
            # The cache has no room of its own.
            known = room.total > 0
            yield (
                room.backend,
                room.what,
                output.ListedSize(room.total if known else None),
                output.ListedSize(room.free if known else None),
                output.ListedSize(room.used_by_us),
                room.provider,
            )


class Audit(base.FindingLister):
    """Compare rows, storages and cache; change nothing.

    The exit code is 1 if there is a finding of severity error.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--all", action="store_true", help="print what is left alone as well"
        )

    def findings(self, parsed_args: argparse.Namespace) -> Iterable[Finding]:
        self.fine = parsed_args.all
        return self.manager.audit()


class Recover(base.FindingLister):
    """Settle what dead operations have left on this host.

    Only says what would be done, unless --apply is given.
    """

    REMEDY = "Action"
    EMPTY = "nothing to recover"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--apply", action="store_true", help="do it")

    def findings(self, parsed_args: argparse.Namespace) -> Iterable[Finding]:
        return self.manager.recover(dry_run=not parsed_args.apply)

    def conclusion(
        self, parsed_args: argparse.Namespace, counts: dict[Severity, int]
    ) -> str:
        if not parsed_args.apply and any(counts.values()):
            return "dry run: nothing was changed; --apply does it"
        return ""


class BackendList(base.Lister):
    """List the backends of this host, and whether they work."""

    COLUMNS = ("Name", "Driver", "Enabled", "State", "Says")

    def rows(self, _parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        from imagebackend.model import Severity

        order = list(Severity)
        for backend in self.manager.backends():
            findings = backend.findings
            worst = max(
                (finding.severity for finding in findings),
                key=order.index,
                default=Severity.OK,
            )
            says = [
                finding.what
                for finding in findings
                if finding.severity is not Severity.OK
            ]
            yield (
                backend.name,
                backend.driver,
                backend.enabled,
                str(worst) if backend.enabled or findings else "",
                "; ".join(says),
            )


class ConfigCheck(base.FindingLister):
    """Check whether this host can work as it is configured.

    The exit code is 1 if there is a finding of severity error.
    """

    EMPTY = "nothing to complain of"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--flavors",
            metavar="FILE",
            type=flavors_file,
            default=[],
            help="also say where the disks of each of these flavors would go: a JSON "
            "array, or what `openstack flavor list --long -f json` prints",
        )
        parser.add_argument(
            "--project",
            metavar="ID",
            default="",
            help="the project whose instances they would be",
        )

    def findings(self, parsed_args: argparse.Namespace) -> Iterable[Finding]:
        return self.manager.check(parsed_args.flavors, project_id=parsed_args.project)


class DbUpgrade(base.ShowOne):
    """Bring the store's schema up to this version's."""

    COLUMNS = ("Before", "After")

    def values(self, _parsed_args: argparse.Namespace) -> Sequence[Any]:
        before, after = self.manager.upgrade_store()
        self.summary = (
            f"the store was at {after} already"
            if before == after
            else f"the store is at {after} now"
        )
        return (before, after)
