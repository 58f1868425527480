# SPDX-License-Identifier: Apache-2.0
"""Operations: who works on what, and whether he is still alive.

Every mutating call is a row, unique by its target, and holds a lock on a file of
its own for as long as it runs. The lock is on an open file description that child
processes inherit: an orphaned ``qemu-img`` counts as alive. Whoever can take the
lock knows that the owner is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import tenacity
from oslo_log import log
from sqlalchemy import exc as sa_exc

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.host import Host
from imagebackend.store.rows import OperationRow, Store, Transaction

LOG = log.getLogger(__name__)


class Operation:
    """A running operation; ends when its row is deleted."""

    def __init__(self, row: OperationRow, host: Host, fd: int) -> None:
        self.row = row
        self._host = host
        self._fd = fd
        self._workdir: str | None = None

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def fd(self) -> int:
        """Of the lock; children inherit it."""
        return self._fd

    def workdir(self) -> str:
        """A folder that goes with the operation.

        QEMU, as another user, may be told to write into a file of it: so it can be
        entered, though not listed.
        """
        if self._workdir is None:
            self._workdir = self._host.folder("tmp", self.id, mode=0o711)
        return self._workdir

    def finish(self, tx: Transaction) -> None:
        """Delete the row, with whatever else the transaction does."""
        tx.delete(self.row)

    def close(self) -> None:
        """Let go of the lock; remove what belongs to the operation on this host.

        Again: nothing, since the number of the descriptor may be another file's by
        then.
        """
        if self._fd < 0:
            return
        shutil.rmtree(_workdir(self._host, self.id), ignore_errors=True)
        # What a failing file system keeps of it, a sweep finds.
        with contextlib.suppress(OSError):
            os.unlink(_lock_path(self._host, self.id))
        os.close(self._fd)
        self._fd = -1


class Operations:
    """Begins operations, and tells dead ones."""

    def __init__(self, store: Store, host: Host) -> None:
        self._store = store
        self._host = host

    @contextlib.contextmanager
    def begin(
        self,
        verb: str,
        target: str,
        settle: Callable[[Operation], None],
        **detail: Any,
    ) -> Iterator[Operation]:
        """Hold ``target`` for the block.

        When the block fails, ``settle`` brings storage and rows back to a settled
        state, exactly as recovery would after a crash at that point.

        :raises Busy: a live operation, or a dead one of another host, holds it.
        """
        operation = self._acquire(verb, target, settle, detail)
        try:
            with processes.inheriting(operation.fd):
                try:
                    yield operation
                except BaseException as error:
                    try:
                        settle(operation)
                    except exc.ImageBackendError as trouble:
                        # The first error is what the caller has to know; the row
                        # stays, and recovery or the next verb tries again.
                        error.add_note(f"not settled yet: {trouble.message}")
                        LOG.error("cannot settle %s of %s: %s", verb, target, trouble)
                    raise
        finally:
            operation.close()

    def take_over(self, row: OperationRow) -> Operation | None:
        """The operation of a dead owner of this host; None if he is alive.

        Works for this host's operations only: nobody else can see the lock.
        """
        if row.host_id != self._host.id:
            return None
        fd = _lock(_lock_path(self._host, row.id))
        return None if fd is None else Operation(row, self._host, fd)

    def alive(self, row: OperationRow) -> bool | None:
        """Whether the owner lives; None: not this host's, so not known."""
        if row.host_id != self._host.id:
            return None
        try:
            fd = os.open(_lock_path(self._host, row.id), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # Shared: those who only look do not take each other for the owner.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def sweep(self) -> list[str]:
        """Remove locks and folders that dead owners left without a row."""
        swept = []
        names = set()
        for kind, suffix in (("locks", ".lock"), ("tmp", "")):
            folder = os.path.join(self._host.state_path, kind)
            with contextlib.suppress(FileNotFoundError):
                names |= {name.removesuffix(suffix) for name in os.listdir(folder)}
        for name in sorted(names):
            path = _lock_path(self._host, name)
            fd = _lock(path)
            if fd is None:
                continue
            # Locked first, then looked: a live owner inserts its row while it has
            # the lock.
            try:
                with self._store.reading() as rows:
                    known = any(
                        row.id == name for row in rows.operations(self._host.id)
                    )
                if not known:
                    shutil.rmtree(_workdir(self._host, name), ignore_errors=True)
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    swept.append(name)
            finally:
                os.close(fd)
        return swept

    def _acquire(
        self,
        verb: str,
        target: str,
        settle: Callable[[Operation], None],
        detail: dict[str, Any],
    ) -> Operation:
        row = OperationRow(
            id=str(uuid.uuid4()),
            verb=verb,
            target=target,
            host_id=self._host.id,
            boot_id=self._host.boot_id,
            pid=os.getpid(),
            detail=detail,
        )
        self._host.folder("locks")
        fd = _lock(_lock_path(self._host, row.id))
        if fd is None:  # a sweep is looking at the new file at this moment
            return self._acquire(verb, target, settle, detail)
        operation = Operation(row, self._host, fd)
        try:
            for last in (False, True):
                try:
                    self._insert(row)
                    return operation
                except sa_exc.IntegrityError:
                    self._make_way(verb, target, settle, last)
        except BaseException:
            operation.close()
            raise
        raise AssertionError("unreachable")

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(exc.StoreContended),
        wait=tenacity.wait_random_exponential(multiplier=0.01, max=0.5),
        stop=tenacity.stop_after_delay(10),
        reraise=True,
    )
    def _insert(self, row: OperationRow) -> None:
        """Several who wait for the end of one operation may be a deadlock to a
        server, which then lets one of them win."""
        with self._store.writing() as tx:
            tx.insert(row)

    def _make_way(
        self,
        verb: str,
        target: str,
        settle: Callable[[Operation], None],
        last: bool,
    ) -> None:
        with self._store.reading() as rows:
            holder = rows.operation(target)
        if holder is None:
            if last:
                raise _busy(verb, target, None)
            return  # ended meanwhile: try once more
        if last and self.alive(holder) is False:
            raise exc.Busy(
                f"cannot {verb} {target}: operation {holder.verb} has died, and what "
                f"it left cannot be settled yet: `imagebackend recover` says why",
                target=target,
                operation=holder.id,
                verb=holder.verb,
            )
        dead = None if last else self.take_over(holder)
        if dead is None:
            raise _busy(verb, target, holder)
        try:
            settle(dead)
        finally:
            dead.close()


def _busy(verb: str, target: str, holder: OperationRow | None) -> exc.Busy:
    if holder is None:
        return exc.Busy(f"cannot {verb} {target}: others are at it", target=target)
    seconds = max(0, int(time.time() - holder.started_at))
    return exc.Busy(
        f"cannot {verb} {target}: operation {holder.verb} (process {holder.pid} of "
        f"host {holder.host_id}) has held it for {seconds} s",
        target=target,
        operation=holder.id,
        verb=holder.verb,
    )


def _lock_path(host: Host, operation_id: str) -> str:
    return os.path.join(host.state_path, "locks", f"{operation_id}.lock")


def _workdir(host: Host, operation_id: str) -> str:
    return os.path.join(host.state_path, "tmp", operation_id)


def _lock(path: str) -> int | None:
    """An open, locked file; None if somebody else has the lock."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            continue
        except OSError as error:
            raise processes.space_error(error, path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A sweep may have unlinked the file between open and lock.
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        os.close(fd)
