# SPDX-License-Identifier: Apache-2.0
"""Guests for the demo and the tests, through libvirt, without hardware acceleration.

The library itself never starts a guest; a compute service has its own way.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import tty
import uuid as uuid_module
from collections.abc import Sequence
from types import TracebackType
from typing import Any
from xml.etree import ElementTree as ET

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.testing.guest_image import Report, parse_console

_DOMAIN = """\
<domain type="qemu">
  <memory unit="MiB">128</memory>
  <vcpu>1</vcpu>
  <os><type arch="x86_64" machine="pc">hvm</type></os>
  <features><acpi/></features>
  <on_reboot>destroy</on_reboot>
  <devices>
    <controller type="usb" model="none"/>
    <serial type="pty"/>
    <memballoon model="none"/>
  </devices>
</domain>
"""


class _Terminal:
    """The guest's serial line, as the terminal that QEMU made for it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        tty.setraw(self._fd)

    def read(self) -> bytes:
        try:
            select.select([self._fd], [], [])
            return os.read(self._fd, 65536)
        except OSError:  # QEMU has gone
            return b""

    def write(self, data: bytes) -> None:
        os.write(self._fd, data)

    def close(self) -> None:
        os.close(self._fd)


class _Stream:
    """The same through libvirt, for who is not root. On a connection of its own: a
    read waits on it."""

    def __init__(self, uri: str, uuid: str) -> None:
        import libvirt

        self._error = libvirt.libvirtError
        self._connection = libvirt.open(uri)
        self._stream = self._connection.newStream(0)
        domain = self._connection.lookupByUUIDString(uuid)
        domain.openConsole(None, self._stream, libvirt.VIR_DOMAIN_CONSOLE_FORCE)

    def read(self) -> bytes:
        try:
            data: bytes = self._stream.recv(65536)
        except self._error:
            return b""
        return data

    def write(self, data: bytes) -> None:
        self._stream.send(data)

    def close(self) -> None:
        with contextlib.suppress(self._error):
            self._stream.abort()
        with contextlib.suppress(self._error):
            self._connection.close()


class TestGuest:
    """A transient domain with the guest of :mod:`imagebackend.testing.guest_image`.

    A context manager: in the end the guest is off.

    :param disks_xml: ``<disk>`` elements, as ``DiskManager.libvirt_xml`` gives them.
    :param uuid: of the domain; an instance's own, so that it is found by it.
    :param memory_mib: enough for kernel, initramfs and a little cache.
    """

    __test__ = False  # pytest would take the name for a test

    def __init__(
        self,
        name: str,
        disks_xml: Sequence[str],
        *,
        uri: str = "qemu:///system",
        uuid: str | None = None,
        memory_mib: int = 128,
    ) -> None:
        self.uuid = uuid or str(uuid_module.uuid4())
        self._name = name
        self._disks = disks_xml
        self._uri = uri
        self._memory = memory_mib
        self._connection: Any = None
        self._domain: Any = None
        self._console: _Terminal | _Stream | None = None
        self._text = ""
        self._heard = threading.Condition()

    def __enter__(self) -> TestGuest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def console(self) -> str:
        """All that the guest has said."""
        with self._heard:
            return self._text

    def report(self) -> Report:
        """What the guest has said of itself."""
        return parse_console(self.console)

    def xml(self) -> str:
        """The domain as libvirt has it now."""
        return str(self._domain.XMLDesc(0))

    def start(self) -> None:
        """:raises HypervisorError: libvirt refuses, or does not answer.

        :raises MissingDependency: libvirt's Python binding is not installed.
        """
        try:
            import libvirt
        except ImportError:
            raise processes.missing("libvirt-python", "python3-libvirt") from None

        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        try:
            self._connection = libvirt.open(self._uri)
            # Paused: what it says before the console is open would be lost.
            self._domain = self._connection.createXML(
                self._domain_xml(), libvirt.VIR_DOMAIN_START_PAUSED
            )
            self._open_console()
            self._domain.resume()
        except libvirt.libvirtError as error:
            raise exc.HypervisorError(
                f"guest {self._name} does not start: {error}", uri=self._uri
            ) from error

    def wait_ready(self, timeout: float = 90) -> Report:
        """:raises TimeoutError: it has not booted by then.

        :raises HypervisorError: it went off instead.
        """
        self._wait_for("IMAGEBACKEND-READY", 0, timeout)
        return self.report()

    def command(self, text: str, timeout: float = 60) -> str:
        """The guest's answer. :raises HypervisorError: it failed, or is off."""
        start = self._send(text)
        answer = self._wait_for(
            ("IMAGEBACKEND-OK", "IMAGEBACKEND-FAILED"), start, timeout
        )
        if answer.startswith("IMAGEBACKEND-FAILED"):
            raise exc.HypervisorError(f"guest {self._name}: {text}: {answer}")
        return answer.removeprefix("IMAGEBACKEND-OK ")

    def poweroff(self, timeout: float = 60) -> None:
        """Shut down from within; returns when the domain is gone."""
        self._send("poweroff")
        self._wait_gone(timeout)

    def kill(self) -> None:
        """As if the power failed. A guest that is off: nothing."""
        if self._connection is None:
            return
        import libvirt

        if self._domain is not None:
            with contextlib.suppress(libvirt.libvirtError):
                self._domain.destroy()
            self._domain = None
        self._connection.close()
        self._connection = None

    # --- parts -----------------------------------------------------------------

    def _domain_xml(self) -> str:
        domain = ET.fromstring(_DOMAIN)
        memory = domain.find("memory")
        assert memory is not None
        memory.text = str(self._memory)
        ET.SubElement(domain, "name").text = self._name
        ET.SubElement(domain, "uuid").text = self.uuid
        devices = domain.find("devices")
        assert devices is not None
        for number, disk in enumerate(self._disks):
            devices.insert(number, ET.fromstring(disk))
        if devices.find("./disk/target[@bus='scsi']") is not None:
            # libvirt's own choice for this machine is one that the guest has no
            # driver for.
            ET.SubElement(devices, "controller", type="scsi", model="virtio-scsi")
        return ET.tostring(domain, encoding="unicode")

    def _open_console(self) -> None:
        source = ET.fromstring(self.xml()).find("./devices/serial/source")
        path = source.get("path") if source is not None else None
        if path is None:
            raise exc.HypervisorError(f"guest {self._name} has no serial console")
        console: _Terminal | _Stream
        try:
            console = _Terminal(path)
        except PermissionError:
            console = _Stream(self._uri, self.uuid)
        self._console = console
        threading.Thread(target=self._listen, args=(console,), daemon=True).start()

    def _send(self, line: str) -> int:
        """Say it to the guest; returns from where on the answer comes."""
        with self._heard:
            if self._console is None:
                raise self._is_off()
            start = len(self._text)
            self._console.write(f"{line}\n".encode())
            return start

    def _is_off(self) -> exc.HypervisorError:
        return exc.HypervisorError(f"guest {self._name} is off", name=self._name)

    def _listen(self, console: _Terminal | _Stream) -> None:
        while True:
            data = console.read()
            with self._heard:
                self._text += data.decode(errors="replace").replace("\r", "")
                if not data:
                    # With the lock: the number may be another file's right after.
                    self._console = None
                    console.close()
                self._heard.notify_all()
            if not data:
                return

    def _wait_for(self, what: str | tuple[str, ...], start: int, timeout: float) -> str:
        """The first whole line from ``start`` on that begins so."""
        deadline = time.monotonic() + timeout
        with self._heard:
            while True:
                *lines, _ = self._text[start:].split("\n")
                for line in lines:
                    if line.startswith(what):
                        return line
                if self._console is None:
                    raise self._is_off()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"guest {self._name} has not said {what} within {timeout:g} s, "
                        f"but: {self._text[-500:]!r}"
                    )
                self._heard.wait(left)

    def _wait_gone(self, timeout: float) -> None:
        import libvirt

        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                if not self._domain.isActive():
                    return
            except libvirt.libvirtError:
                return
            time.sleep(0.02)
        raise TimeoutError(f"guest {self._name} is still on after {timeout:g} s")
