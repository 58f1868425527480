# SPDX-License-Identifier: Apache-2.0
"""``cache``: the images that this host keeps."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from imagebackend.cli import base, output

if TYPE_CHECKING:
    from imagebackend.model import Finding, Severity


class List(base.Lister):
    """List the images in this host's cache."""

    COLUMNS = (
        "Image",
        "Format",
        "Virtual Size",
        "Allocated",
        "Last Used",
        "Leases",
        "Broken",
        "Entry",
    )
    EMPTY = "the cache is empty"

    def rows(self, _parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        for entry in self.manager.cache_entries():
            yield (
                entry.image_id,
                entry.format,
                output.ListedSize(entry.virtual_size),
                output.ListedSize(entry.allocated),
                output.when(entry.last_used),
                output.Names(list(entry.leases)),
                entry.broken,
                entry.entry,
            )


class Prefetch(base.Lister):
    """Fetch images into the cache before they are needed.

    An image that cannot be fetched is reported; the others are fetched all the same.
    """

    COLUMNS = ("Image", "Format", "Virtual Size", "Path", "Entry")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("images", metavar="IMAGE", nargs="+", help="id of an image")

    def rows(self, parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        from imagebackend.exceptions import ImageBackendError

        for image_id in parsed_args.images:
            try:
                with self.app.progress() as progress:
                    image = self.manager.prefetch(image_id, progress=progress)
            except ImageBackendError as error:
                self.app.LOG.error("%s", error.message, exc_info=error)
                self.code = 1
                continue
            yield (
                image_id,
                image.format,
                output.ListedSize(image.virtual_size),
                image.path,
                image.entry,
            )


class Prune(base.FindingLister):
    """Remove from the cache what no disk needs.

    Damaged, old and, over the cache's budget, least recently used images go.
    """

    REMEDY = "Action"
    EMPTY = "nothing to remove"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dry-run", action="store_true", help="only say what would be removed"
        )
        parser.add_argument(
            "--forget-host",
            metavar="ID",
            action="append",
            default=[],
            help="first drop the leases of another host that shared the cache and is "
            "gone for good; repeatable",
        )

    def findings(self, parsed_args: argparse.Namespace) -> Iterable[Finding]:
        if parsed_args.forget_host and parsed_args.dry_run:
            self.usage("--forget-host cannot be tried by --dry-run")
        for host_id in parsed_args.forget_host:
            self.manager.forget_host(host_id)
        return self.manager.prune(dry_run=parsed_args.dry_run)

    def conclusion(
        self, parsed_args: argparse.Namespace, counts: dict[Severity, int]
    ) -> str:
        if parsed_args.dry_run and any(counts.values()):
            return "dry run: nothing was removed"
        return ""
