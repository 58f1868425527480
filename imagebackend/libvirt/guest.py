# SPDX-License-Identifier: Apache-2.0
"""Work on the disks of a running guest, through libvirt.

Disks are named by serial, which is their id here and never changes; libvirt's own
names for them are looked up in the domain's XML each time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable
from xml.etree import ElementTree as ET

from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend.libvirt.connection import connect, library, translated
from imagebackend.model import Progress, ProgressCallback

LOG = log.getLogger(__name__)

_AGENT = "org.qemu.guest_agent.0"
_AGENT_TIMEOUT = 30
_FIRST_LOOK = 0.01
_LAST_LOOK = 0.5
#: Seconds in which a job that was told to end does.
_ABORT = 30.0


@runtime_checkable
class GuestDisks(Protocol):
    """What an action needs of a running guest."""

    @property
    def uuid(self) -> str: ...

    def block_resize(self, serial: str, size: int) -> None:
        """The guest's disk has ``size`` bytes from now on; QEMU grows it, or is told
        that the storage has."""

    def backup(
        self,
        files: Mapping[str, str],
        format_: str,
        *,
        quiesce: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Copy disks, by serial, into new files: all of one point in time.

        :param quiesce: fail if the guest cannot be made to flush its file systems.
        """

    def frozen(
        self, *, quiesce: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """The guest writes nothing in the block, as far as its agent can see to it."""
        ...


class Guest:
    """A running domain of libvirt's; see :meth:`lookup`."""

    def __init__(self, conf: cfg.ConfigOpts, domain: Any) -> None:
        self._conf = conf
        self._domain = domain

    @classmethod
    def lookup(cls, conf: cfg.ConfigOpts, uuid: str) -> Guest:
        """The running domain of that uuid.

        :raises HypervisorError: libvirt does not answer, or no such domain runs.
        """
        libvirt = library()
        connection = connect(conf)
        try:
            domain = connection.lookupByUUIDString(uuid)
            active = domain.isActive()
        except libvirt.libvirtError as error:
            raise translated(f"look up guest {uuid}", error) from error
        if not active:
            raise exc.HypervisorError(
                f"guest {uuid} does not run: leave the guest out for work on a "
                f"stopped one",
                guest=uuid,
            )
        return cls(conf, domain)

    @property
    def uuid(self) -> str:
        return str(self._domain.UUIDString())

    def block_resize(self, serial: str, size: int) -> None:
        libvirt = library()
        device = self._device(serial)
        with self._errors(f"grow disk {device}"):
            self._domain.blockResize(
                device, size, libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES
            )

    def backup(
        self,
        files: Mapping[str, str],
        format_: str,
        *,
        quiesce: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        targets = {self._device(serial): path for serial, path in files.items()}
        xml = _backup_xml(targets, self._devices().values(), format_)
        with contextlib.ExitStack() as job:
            with self.frozen(quiesce=quiesce), self._errors("begin a backup"):
                self._domain.backupBegin(xml, None, 0)
                job.callback(self._abort)
            self._wait(progress)
            job.pop_all()

    @contextlib.contextmanager
    def frozen(self, *, quiesce: bool = False) -> Iterator[None]:
        libvirt = library()
        try:
            self._freeze()
        except exc.HypervisorError as error:
            if quiesce:
                raise
            LOG.warning("taken without quiescing: %s", error.message)
        try:
            yield
        finally:
            # Also after a freeze that failed half way.
            if self._has_agent():
                try:
                    self._domain.fsThaw()
                except libvirt.libvirtError as error:
                    LOG.error("guest %s does not thaw: %s", self.uuid, error)

    def _freeze(self) -> None:
        if not self._has_agent():
            raise exc.HypervisorError(
                f"guest {self.uuid} has no guest agent that answers: its file systems "
                f"cannot be flushed",
                guest=self.uuid,
            )
        with self._errors("freeze the file systems"):
            self._domain.agentSetResponseTimeout(_AGENT_TIMEOUT)
            self._domain.fsFreeze()

    def _has_agent(self) -> bool:
        for target in self._xml().findall("./devices/channel/target"):
            if target.get("name") == _AGENT:
                return target.get("state") == "connected"
        return False

    def _wait(self, progress: ProgressCallback | None) -> None:
        """To the job's end; no progress for too long counts as a failure."""
        libvirt = library()
        patience = self._conf.imagebackend_libvirt.operation_timeout
        pause, done, since = _FIRST_LOOK, -1, time.monotonic()
        while True:
            with self._errors("look at the backup"):
                stats = self._domain.jobStats()
            if stats.get("type", libvirt.VIR_DOMAIN_JOB_NONE) == (
                libvirt.VIR_DOMAIN_JOB_NONE
            ):
                break
            now = int(stats.get("disk_processed", 0))
            if now != done:
                done, since = now, time.monotonic()
                if progress is not None:
                    total = int(stats.get("disk_total", 0))
                    progress(Progress("snapshot", done, total))
            elif time.monotonic() - since > patience:
                raise exc.HypervisorError(
                    f"the backup of guest {self.uuid} has not moved for {patience} s: "
                    f"[imagebackend_libvirt] operation_timeout",
                    guest=self.uuid,
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
        with self._errors("look at the backup's end"):
            stats = self._domain.jobStats(libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED)
        if stats.get("type") != libvirt.VIR_DOMAIN_JOB_COMPLETED:
            reason = stats.get("errmsg") or "no reason given"
            raise exc.HypervisorError(
                f"the backup of guest {self.uuid} failed: {reason}", guest=self.uuid
            )

    def _abort(self) -> None:
        libvirt = library()
        with contextlib.suppress(libvirt.libvirtError):
            self._domain.abortJob()

    def _device(self, serial: str) -> str:
        try:
            return self._devices()[serial]
        except KeyError:
            raise exc.HypervisorError(
                f"guest {self.uuid} has no disk of serial {serial}: is it another "
                f"instance's guest?",
                guest=self.uuid,
                serial=serial,
            ) from None

    def _devices(self) -> dict[str, str]:
        """Target devices by serial; a disk without one by its device."""
        found = {}
        for disk in self._xml().findall("./devices/disk"):
            target = disk.find("target")
            if target is not None:
                device = target.get("dev", "")
                found[disk.findtext("serial") or device] = device
        return found

    def _xml(self) -> ET.Element:
        with self._errors("read the domain's XML"):
            return ET.fromstring(self._domain.XMLDesc(0))

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        libvirt = library()
        try:
            yield
        except libvirt.libvirtError as error:
            raise translated(f"{what} of guest {self.uuid}", error) from error


def abort_leftover_job(conf: cfg.ConfigOpts, uuid: str) -> bool:
    """End the backup job that a dead process began; True if there was one.

    :raises HypervisorError: libvirt does not answer.
    """
    libvirt = library()
    backup = libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP
    try:
        domain = connect(conf).lookupByUUIDString(uuid)
        if domain.jobStats().get("operation") != backup:
            return False
        domain.abortJob()
        # It ends in its own time, and writes until then.
        deadline = time.monotonic() + _ABORT
        while domain.jobStats().get("operation") == backup:
            if time.monotonic() > deadline:
                raise exc.HypervisorError(
                    f"the backup of guest {uuid} does not end after {_ABORT:.0f} s"
                )
            time.sleep(0.05)
    except libvirt.libvirtError as error:
        if error.get_error_code() in (
            libvirt.VIR_ERR_NO_DOMAIN,
            libvirt.VIR_ERR_OPERATION_INVALID,
        ):
            return False
        raise translated(f"end the backup of guest {uuid}", error) from error
    return True


def version(conf: cfg.ConfigOpts) -> str:
    """libvirt's version. :raises HypervisorError: it does not answer."""
    libvirt = library()
    connection = connect(conf)
    try:
        number = connection.getLibVersion()
    except libvirt.libvirtError as error:
        raise translated("ask libvirt for its version", error) from error
    return f"{number // 1000000}.{number // 1000 % 1000}.{number % 1000}"


def _backup_xml(targets: Mapping[str, str], devices: Any, format_: str) -> str:
    backup = ET.Element("domainbackup", mode="push")
    disks = ET.SubElement(backup, "disks")
    for device in devices:
        if device not in targets:
            ET.SubElement(disks, "disk", name=device, backup="no")
            continue
        disk = ET.SubElement(disks, "disk", name=device, backup="yes", type="file")
        ET.SubElement(disk, "target", file=targets[device])
        ET.SubElement(disk, "driver", type=format_)
    return ET.tostring(backup, encoding="unicode")
