# SPDX-License-Identifier: Apache-2.0
"""Who this host is: an id in a file, never a name."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import uuid

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.local_files import fsync_path
from imagebackend.model import Connector

_FILE = "host-id"


class Host:
    """This host. Keeps its argument; the id is made when first asked for."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf

    @property
    def state_path(self) -> str:
        path: str = os.path.abspath(self._conf.imagebackend.state_path)
        return path

    @functools.cached_property
    def id(self) -> str:
        """uuid; stable over restarts and renames of the host."""
        path = os.path.join(self.state_path, _FILE)
        try:
            return _read(path)
        except FileNotFoundError:
            pass
        try:
            os.makedirs(self.state_path, mode=0o711, exist_ok=True)
            temporary = f"{path}.{uuid.uuid4()}"
            try:
                with open(temporary, "x", encoding="ascii") as file:
                    file.write(f"{uuid.uuid4()}\n")
                    file.flush()
                    os.fsync(file.fileno())
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
            # Rows will carry the id: it must not be lost before they are.
            fsync_path(self.state_path)
        except OSError as error:
            raise processes.space_error(error, path) from error
        return _read(path)

    @property
    def known(self) -> bool:
        """Whether there is an id already, so that asking for it makes none."""
        return os.path.exists(os.path.join(self.state_path, _FILE))

    @functools.cached_property
    def boot_id(self) -> str:
        """Changes with every start of the host's kernel."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()

    @property
    def hostname(self) -> str:
        return socket.gethostname()

    @property
    def connector(self) -> Connector:
        """This host as a storage is to know it."""
        return Connector(self.id, self.hostname)

    def folder(self, *names: str, mode: int = 0o700) -> str:
        """A folder under the state path, made if need be; private unless ``mode``
        says otherwise."""
        path = self.state_path
        try:
            os.makedirs(path, mode=0o711, exist_ok=True)
            for name in names:
                path = os.path.join(path, name)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, mode)
        except OSError as error:
            raise processes.space_error(error, path) from error
        return path


def _read(path: str) -> str:
    """:raises FileNotFoundError: there is none yet."""
    try:
        with open(path, encoding="ascii", errors="backslashreplace") as file:
            text = file.read(80).strip()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise exc.HostError(
            f"cannot read this host's id from {path}: {error.strerror}", path=path
        ) from error
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise exc.HostError(
            f"{path} does not hold this host's id, a uuid, but {text[:40]!r}: restore "
            f"it, since the rows of this host's disks carry it",
            path=path,
        ) from None
