# SPDX-License-Identifier: Apache-2.0
"""The demo: an instance's disks from birth to the end, as a guest sees them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from imagebackend.cli import output
from imagebackend.cli.base import Command

if TYPE_CHECKING:
    from oslo_config import cfg

    from imagebackend.libvirt.guest import Guest
    from imagebackend.manager import DiskManager
    from imagebackend.model import Instance
    from imagebackend.testing.guest_image import Report
    from imagebackend.testing.libvirt_guest import TestGuest

_WIDTH = 20
_IMAGE = "guest"
#: Backends that need no more than the demo's own folder.
_EMBEDDED = ("qcow2", "raw")
_SNAPSHOT = "demo-snapshot"


class Demo(Command):
    """Show on real guests what the library does

    Makes an instance's disks with the embedded defaults in a new folder (qcow2 files,
    images in a folder, SQLite) or in a storage of the configuration, boots a small
    guest from them through libvirt, and shows after each step what the guest itself
    says. In the end nothing is left.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--guest-image",
            metavar="FILE",
            required=True,
            help="the small guest's image: made by `python -m "
            "imagebackend.testing.guest_image FILE`",
        )
        parser.add_argument(
            "--backend",
            metavar="NAME",
            default="qcow2",
            help="the storage of the disks: qcow2, raw, or a backend of the "
            "configuration, whose options are taken from there (default: "
            "%(default)s)",
        )
        parser.add_argument(
            "--volume-type",
            metavar="TYPE",
            help="volume type of the disks, where the storage has such",
        )

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        # Where QEMU, as another user, may go: a home folder may be closed to it.
        folder = tempfile.mkdtemp(prefix="imagebackend-demo-", dir="/var/tmp")
        os.chmod(folder, 0o711)  # noqa: S103
        # The small guest has no agent: that it is not quiesced is no news here.
        logging.getLogger("imagebackend.libvirt.guest").setLevel(logging.ERROR)
        try:
            os.mkdir(os.path.join(folder, "images"))
            shutil.copy(
                parsed_args.guest_image,
                os.path.join(folder, "images", f"{_IMAGE}.qcow2"),
            )
            _Story(self, folder, parsed_args.backend, parsed_args.volume_type).tell()
        finally:
            shutil.rmtree(folder)

    def say(self, text: str = "") -> None:
        print(output.escape(text), file=self.app.stdout, flush=True)


class _Story:
    """The steps, in the order in which they are told."""

    def __init__(
        self, demo: Demo, folder: str, backend: str, volume_type: str | None
    ) -> None:
        from imagebackend.manager import DiskManager
        from imagebackend.model import Flavor, Instance

        self._say = demo.say
        self._folder = folder
        self._conf = _configuration(folder, backend, demo.app.conf)
        self._manager: DiskManager = DiskManager(self._conf)
        specs = {"imagebackend:volume_type": volume_type} if volume_type else {}
        self._number = 0
        self._began = time.monotonic()
        self._instance: Instance = Instance(
            id=str(uuid.uuid4()),
            project_id="demo",
            image=_IMAGE,
            flavor=Flavor("small", root_gb=1, swap_mb=64, extra_specs=specs),
        )
        #: Bytes of the instance's disks on this host's own file systems, at most.
        self._local = 0

    def tell(self) -> None:
        from imagebackend.libvirt import secret

        with self._manager, secret.restored(self._conf):
            try:
                self._create()
                self._boots()
                self._rebuild()
            finally:
                # Also when a step failed: the demo leaves nothing behind.
                change = self._manager.destroy(self._instance.id)
            self._nothing_left(len(change.deleted))

    def _create(self) -> None:
        self._step("create", "flavor: root 1 GiB, swap 64 MiB; image: guest, 32 MiB")
        change = self._manager.create(self._instance)
        for each in change.created:
            self._line(
                each.name,
                f"{output.size(each.size):>9}  {each.path or 'as it was':6} "
                f"serial {each.disk_id}",
            )

    def _boots(self) -> None:
        from imagebackend.libvirt.guest import Guest
        from imagebackend.model import UploadTarget

        self._step("boot", "a guest through libvirt; on its serial console it says:")
        with self._guest() as guest:
            report = guest.wait_ready()
            self._guest_says(report)
            _expect(report, boot=1)
        self._step("boot again", "its root disk keeps a counter, and what it wrote:")
        with self._guest() as guest:
            self._guest_says(guest.wait_ready())
            _expect(guest.report(), boot=2)
            running = Guest.lookup(self._conf, self._instance.id)
            self._step(
                "grow, running", "flavor: root 2 GiB; the guest sees it at once:"
            )
            self._grow(guest, running)
            self._step(
                "snapshot, running", "its root disk as an image; it goes on running"
            )
            info = self._manager.snapshot(
                self._instance.id, UploadTarget(_SNAPSHOT), running
            )
            self._line(info.id, f"{output.size(info.size or 0):>9}  {info.disk_format}")

    def _grow(self, guest: TestGuest, running: Guest) -> None:
        from imagebackend.exceptions import NotSupported

        self._larger(2)
        try:
            self._manager.resize(self._instance, running)
        except NotSupported as error:
            self._line("refused", error.message)
            self._line("", "so it grows before the rebuild")
            return
        guest.command("disks")
        self._guest_says(guest.report())
        _expect(guest.report(), boot=2, root=2 << 30)

    def _rebuild(self) -> None:
        # Where it has grown already there is nothing to do.
        self._manager.resize(self._instance)
        self._step("rebuild", "from the image again: new objects, the same serials")
        for each in self._manager.rebuild(self._instance).recreated:
            self._line(each.name, f"{output.size(each.size):>9}  serial {each.disk_id}")
        self._step("boot", "pristine: the counter begins at 1")
        with self._guest() as guest:
            self._guest_says(guest.wait_ready())
            _expect(guest.report(), boot=1, root=2 << 30)

    def _nothing_left(self, deleted: int) -> None:
        from imagebackend.model import Severity

        self._step("destroy", f"{deleted} disks deleted")
        self._line("this host's disk", f"{output.size(self._local):>9}  at most")
        files = [
            name
            for _, _, names in os.walk(os.path.join(self._folder, "instances"))
            for name in names
            if not name.startswith(".folder-id")
        ]
        found = [
            each for each in self._manager.audit() if each.severity is not Severity.OK
        ]
        self._line("disks left", str(len(list(self._manager.list()))))
        self._line("files left", str(len(files)))
        self._line("audit", f"{len(found)} findings")
        if files or found:
            raise RuntimeError(f"the demo left something: {files} {found}")
        self._say()
        self._say(f"done in {time.monotonic() - self._began:.1f} s")

    # --- help ------------------------------------------------------------------

    @contextlib.contextmanager
    def _guest(self) -> Iterator[TestGuest]:
        """A guest with the instance's disks; it is off, and they are let go, after."""
        from imagebackend.testing.libvirt_guest import TestGuest

        self._manager.connect(self._instance.id)
        try:
            with TestGuest(
                f"imagebackend-demo-{self._instance.id[:8]}",
                self._manager.libvirt_xml(self._instance.id),
                uri=self._conf.imagebackend_libvirt.uri,
                uuid=self._instance.id,
            ) as guest:
                guest.start()
                yield guest
                self._local = max(self._local, _taken(self._folder))
                guest.poweroff()
        finally:
            self._manager.disconnect(self._instance.id)

    def _larger(self, root_gb: int) -> None:
        flavor = self._instance.flavor
        if flavor is not None:
            larger = dataclasses.replace(flavor, root_gb=root_gb)
            self._instance = dataclasses.replace(self._instance, flavor=larger)

    def _step(self, name: str, what: str) -> None:
        self._number += 1
        self._say()
        self._say(f"{self._number}. {name:<{_WIDTH}}{what}")

    def _line(self, name: str, what: str) -> None:
        self._say(f"   {name:<{_WIDTH}}{what}")

    def _guest_says(self, report: Report) -> None:
        self._line("guest: boot", f"{report.boot}".rjust(9))
        for disk in report.disks:
            self._line(
                f"guest: {disk.name}",
                f"{output.size(disk.bytes):>9}  serial {disk.serial}",
            )


def _configuration(folder: str, backend: str, theirs: cfg.ConfigOpts) -> cfg.ConfigOpts:
    """The embedded defaults in a folder of our own; libvirt is the host's, and so is a
    storage that needs more than a folder."""
    from oslo_config import cfg

    from imagebackend import conf as options
    from imagebackend.backends.loader import Backends
    from imagebackend.conf.backends import DRIVER

    options.register(theirs)
    conf = cfg.ConfigOpts()
    options.register(conf)
    conf([], default_config_files=[], default_config_dirs=[])
    conf.set_override("state_path", folder, "imagebackend")
    conf.set_override("enabled_backends", [backend], "imagebackend")
    conf.set_override("uri", theirs.imagebackend_libvirt.uri, "imagebackend_libvirt")
    if backend not in _EMBEDDED:
        found = Backends(theirs, str).driver(backend)
        all_ = [DRIVER, *found.OPTIONS, *found.chosen_options(theirs, backend)]
        for each in (theirs, conf):
            each.register_opts(all_, group=backend)
        for option in all_:
            conf.set_override(option.dest, theirs[backend][option.dest], backend)
        if "mount_path" in conf[backend] and not conf[backend].mount_path:
            # What is mounted outlives the demo's folder.
            mounts = os.path.join(theirs.imagebackend.state_path, "mnt")
            conf.set_override("mount_path", mounts, backend)
    return conf


def _taken(folder: str) -> int:
    """Bytes that instances' disks take on this host's own file systems."""
    return sum(
        os.stat(os.path.join(where, name)).st_blocks * 512
        for where, _, names in os.walk(os.path.join(folder, "instances"))
        for name in names
        if not name.startswith(".folder-id")
    )


def _expect(report: Report, *, boot: int, root: int = 1 << 30) -> None:
    """The story is true, or the demo fails."""
    disks = {disk.name: disk.bytes for disk in report.disks}
    if report.boot != boot or disks.get("vda") != root:
        raise RuntimeError(
            f"the guest should say boot {boot} and a root disk of {root} bytes, but "
            f"says boot {report.boot} and {disks}"
        )
