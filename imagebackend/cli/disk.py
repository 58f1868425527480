# SPDX-License-Identifier: Apache-2.0
"""``disk``: make, show and change the disks of instances."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from imagebackend.cli import arguments, base, output

if TYPE_CHECKING:
    from imagebackend.libvirt.guest import Guest
    from imagebackend.model import Change, Disk, Flavor, Instance, Plan


def _add_instance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("instance", metavar="INSTANCE", help="uuid of the instance")


def _add_running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--running",
        action="store_true",
        help="the instance's guest runs, as the libvirt domain of the same uuid",
    )


def _guest(command: base.Command, parsed_args: argparse.Namespace) -> Guest | None:
    if not parsed_args.running:
        return None
    # Registers the options that the look-up reads.
    assert command.manager is not None
    from imagebackend.libvirt.guest import Guest

    return Guest.lookup(command.app.conf, parsed_args.instance)


class Create(base.ChangeLister):
    """Make an instance's disks.

    Root, ephemeral and swap disk as flavor and image say, and others with --disk.
    Again with the same arguments it makes nothing and shows the same disks.
    """

    PLAN = (
        "Name",
        "Role",
        "Lifecycle",
        "Size",
        "Backend",
        "Format",
        "Content",
        "Bus",
        "Device",
        "Image",
        "Chosen By",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_instance(parser)
        parser.add_argument(
            "--image", metavar="ID", help="image that fills the root disk"
        )
        parser.add_argument(
            "--project", metavar="ID", default="", help="project of the instance"
        )
        parser.add_argument(
            "--disk",
            metavar="KEY=VALUE,...",
            type=arguments.disk_spec,
            action="append",
            default=[],
            dest="disks",
            help="a disk beside, or instead of, what the flavor gives; repeatable. "
            f"Keys: {', '.join(arguments.DISK_KEYS)}. A size may have one of the "
            "suffixes K, M, G, T; shareable and cdrom need no value; a comma in a "
            "value is doubled",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="only show what would be made, where and how",
        )
        arguments.add_flavor(parser)

    def columns(self, parsed_args: argparse.Namespace) -> Sequence[str]:
        return self.PLAN if parsed_args.dry_run else self.COLUMNS

    def rows(self, parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        instance = self._instance(parsed_args)
        if not (instance.image or instance.flavor or parsed_args.disks):
            self.usage("say what to make, as with --image, --root-gb or --disk")
        if not parsed_args.dry_run:
            return super().rows(parsed_args)
        plan = self.manager.plan(instance, parsed_args.disks)
        self.summary = "dry run: nothing was made"
        if plan.attached:
            self.summary += f"; would be attached: {', '.join(plan.attached)}"
        return _planned(plan)

    def change(self, parsed_args: argparse.Namespace) -> Change:
        with self.app.progress() as progress:
            return self.manager.create(
                self._instance(parsed_args), parsed_args.disks, progress=progress
            )

    def _instance(self, parsed_args: argparse.Namespace) -> Instance:
        from imagebackend.model import Instance

        return Instance(
            parsed_args.instance,
            project_id=parsed_args.project,
            image=parsed_args.image,
            flavor=_flavor(self, parsed_args, None),
        )


def _flavor(
    command: base.Command, parsed_args: argparse.Namespace, former: Flavor | None
) -> Flavor | None:
    try:
        return arguments.flavor(parsed_args, former)
    except ValueError as error:
        command.usage(str(error))


def _planned(plan: Plan) -> Iterator[Sequence[Any]]:
    for disk in plan.disks:
        yield (
            disk.name,
            str(disk.role),
            str(disk.lifecycle),
            output.ListedSize(disk.size),
            disk.placement.backend,
            disk.placement.format,
            str(disk.placement.path),
            disk.bus,
            disk.device,
            disk.image,
            disk.why,
        )


class List(base.Lister):
    """List disks; one that several instances share, once for each."""

    COLUMNS = ("ID", "Name", "Instance", "Size", "Backend", "State")
    LONG = (
        *COLUMNS,
        "Role",
        "Lifecycle",
        "Format",
        "Device",
        "Connected",
        "Project",
        "Image",
    )
    EMPTY = "no disks are recorded"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--instance", metavar="ID", help="only the disks of this instance"
        )
        parser.add_argument("--long", action="store_true", help="more columns")

    def columns(self, parsed_args: argparse.Namespace) -> Sequence[str]:
        return self.LONG if parsed_args.long else self.COLUMNS

    def rows(self, parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        for disk in self.manager.list(parsed_args.instance):
            row: tuple[Any, ...] = (
                disk.id,
                disk.name,
                disk.instance_id,
                output.ListedSize(disk.size),
                disk.backend,
                str(disk.state),
            )
            if parsed_args.long:
                row += (
                    str(disk.role),
                    str(disk.lifecycle),
                    disk.format,
                    disk.device,
                    disk.connected,
                    disk.project_id,
                    disk.image,
                )
            yield row


class Show(base.ShowOne):
    """Show all that is recorded of a disk."""

    COLUMNS = (
        "ID",
        "Name",
        "Instance",
        "Owners",
        "Project",
        "Role",
        "Lifecycle",
        "State",
        "Reason",
        "Size",
        "Backend",
        "Format",
        "Image",
        "Bus",
        "Device",
        "CD",
        "Shareable",
        "Tainted",
        "Connected",
        "Operation",
        "Generation",
        "Handle",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "id", metavar="DISK|INSTANCE", help="uuid of a disk, or of an instance"
        )
        parser.add_argument(
            "name", metavar="NAME", nargs="?", help="the disk's name in that instance"
        )

    def values(self, parsed_args: argparse.Namespace) -> Sequence[Any]:
        disk = self._find(parsed_args.id, parsed_args.name)
        return (
            disk.id,
            disk.name,
            disk.instance_id,
            output.Names(list(disk.owners)),
            disk.project_id,
            str(disk.role),
            str(disk.lifecycle),
            str(disk.state),
            disk.reason,
            output.Size(disk.size),
            disk.backend,
            disk.format,
            disk.image,
            disk.bus,
            disk.device,
            disk.cdrom,
            disk.shareable,
            disk.tainted,
            disk.connected,
            disk.operation,
            disk.generation_id,
            output.Facts(dict(disk.handle)),
        )

    def _find(self, id_: str, name: str | None) -> Disk:
        from imagebackend import exceptions as exc

        if name is None:
            try:
                return self.manager.disk(id_)
            except exc.DiskNotFound:
                names = ", ".join(disk.name for disk in self.manager.list(id_))
                if not names:
                    raise
            raise exc.DiskNotFound(
                f"{id_} is an instance: name one of its disks behind it, {names}",
                instance=id_,
            )
        disks = list(self.manager.list(id_))
        for disk in disks:
            if disk.name == name:
                return disk
        if not disks:
            raise exc.InstanceNotFound(
                f"no disk of instance {id_} is recorded", instance=id_
            )
        names = ", ".join(disk.name for disk in disks)
        raise exc.DiskNotFound(
            f"instance {id_} has no disk {name!r}: it has {names}", instance=id_
        )


class Delete(base.ChangeLister):
    """Delete an instance's disks, or a disk that no instance has.

    Persistent and shared disks of the instance are kept.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "instance", metavar="INSTANCE", nargs="?", help="uuid of the instance"
        )
        parser.add_argument("--disk", metavar="ID", help="uuid of a disk that was kept")

    def change(self, parsed_args: argparse.Namespace) -> Change:
        if parsed_args.disk is not None:
            return self.manager.delete_disk(parsed_args.disk)
        return self.manager.destroy(parsed_args.instance)

    def rows(self, parsed_args: argparse.Namespace) -> Iterator[Sequence[Any]]:
        if (parsed_args.instance is None) == (parsed_args.disk is None):
            self.usage("name either an instance or, with --disk, a disk")
        return super().rows(parsed_args)


class Resize(base.ChangeLister):
    """Grow an instance's disks to the sizes of another flavor.

    What no option says stays as in the instance's present flavor.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_instance(parser)
        _add_running(parser)
        arguments.add_flavor(parser)

    def change(self, parsed_args: argparse.Namespace) -> Change:
        from imagebackend.model import Instance

        if _flavor(self, parsed_args, None) is None:
            self.usage("say the new sizes, as with --root-gb or --flavor-file")
        present = self.manager.instance(parsed_args.instance).flavor
        flavor = _flavor(self, parsed_args, present)
        guest = _guest(self, parsed_args)
        with self.app.progress() as progress:
            return self.manager.resize(
                Instance(parsed_args.instance, flavor=flavor), guest, progress=progress
            )


class Rebuild(base.ChangeLister):
    """Make an instance's ephemeral disks anew; ids and serials stay.

    The guest must be stopped, and the disks be connected again.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_instance(parser)
        parser.add_argument(
            "--image", metavar="ID", help="new image of the root disk; unset: the same"
        )

    def change(self, parsed_args: argparse.Namespace) -> Change:
        from imagebackend.model import Instance

        with self.app.progress() as progress:
            return self.manager.rebuild(
                Instance(parsed_args.instance, image=parsed_args.image),
                progress=progress,
            )


class Snapshot(base.ShowOne):
    """Keep an instance's root disk, as it is now, as an image."""

    COLUMNS = ("Image", "Disk Format", "Size", "Digest")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_instance(parser)
        parser.add_argument(
            "image",
            metavar="IMAGE",
            help="id of the image to be, or absolute path of a file to be",
        )
        parser.add_argument(
            "--disk-format",
            choices=("qcow2", "raw"),
            default="qcow2",
            help="format of the image, default: qcow2",
        )
        _add_running(parser)

    def values(self, parsed_args: argparse.Namespace) -> Sequence[Any]:
        from imagebackend.model import UploadTarget

        into = UploadTarget(parsed_args.image, disk_format=parsed_args.disk_format)
        guest = _guest(self, parsed_args)
        with self.app.progress() as progress:
            info = self.manager.snapshot(
                parsed_args.instance, into, guest, progress=progress
            )
        self.summary = f"image {info.id} was made ({info.disk_format})"
        return (info.id, info.disk_format, output.Size(info.size), info.digest)


class Flatten(base.Command):
    """Give a disk its own copy of what it shares with its image.

    Afterwards the image can be removed where it lies. The guest may run.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("disk", metavar="DISK", help="uuid of the disk")

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        with self.app.progress() as progress:
            self.manager.flatten(parsed_args.disk, progress=progress)
        self.app.note(f"disk {parsed_args.disk} stands alone")
        return 0


class Xml(base.Command):
    """Print libvirt's elements for an instance's disks.

    The disks are connected to this host first, unless --no-connect says that they
    are. With --disconnect: let go of them instead; the guest must be stopped then.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_instance(parser)
        group = parser.add_mutually_exclusive_group()
        group.add_argument(
            "--no-connect",
            action="store_true",
            help="they are connected: only print",
        )
        group.add_argument(
            "--disconnect", action="store_true", help="let go of them, print nothing"
        )

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        from imagebackend import exceptions as exc

        instance_id = parsed_args.instance
        if parsed_args.disconnect:
            self.manager.disconnect(instance_id)
            self.app.note(f"disconnected the disks of {instance_id}")
            return 0
        if not parsed_args.no_connect:
            self.manager.connect(instance_id)
        elements = self.manager.libvirt_xml(instance_id)
        if parsed_args.no_connect and not elements:
            raise exc.Conflict(
                f"no disk of instance {instance_id} is connected to this host: leave "
                f"--no-connect out to connect them",
                instance=instance_id,
            )
        for element in elements:
            lines = (output.escape(line) for line in element.splitlines())
            text = "\n".join(lines) + "\n"
            encoding = self.app.stdout.encoding or "utf-8"
            # XML has its own way to write what an encoding has not.
            text = text.encode(encoding, "xmlcharrefreplace").decode(encoding)
            self.app.stdout.write(text)
        return 0
