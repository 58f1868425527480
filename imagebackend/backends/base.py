# SPDX-License-Identifier: Apache-2.0
"""The contract between this library and a storage.

This text is the reference; :mod:`imagebackend.testing.suite` proves a backend
against it.

The life of a generation
========================

A *disk* is what an instance sees. It has an id and a serial that never change. A
*generation* is one storage object (a file, an RBD image, a volume) that is, was
or becomes the disk. Rebuild, move and resize by copy make a new generation; the
switch from one to the other is a change of a row in the library's store, never a
rename in the storage. A backend knows generations only; it never sees a disk's
row::

    plan ──► create ──► connect ──► (guest runs) ──► disconnect ──► delete
               │           │                              │
               └ record    └ record                       └ again and again, any host

Terms
=====

*handle*
    A generation's own facts that only its backend reads (a path, pool and image,
    a volume id). Plain JSON values, no secrets. It starts as the placement's
    handle; the backend completes it by calling ``record``.
*record*
    ``record(handle)`` makes the handle durable before it returns. It is called as
    soon as an id is known, and before anything depends on it. It raises
    :class:`~imagebackend.exceptions.Superseded` when the operation has lost its
    generation to another: let that exception pass.
*marker*
    Generation id and deployment id, carried by the object itself (in its name or
    its metadata). Something with *our marker for this generation* is ours;
    anything else is foreign, is never touched, and makes ``create`` raise
    :class:`~imagebackend.exceptions.ObjectExists`.
*attachment*
    What one host needs to let go of a generation: the handle of its
    :class:`~imagebackend.model.Connection`.
*scope*
    What a generation is local to: ``host:<host id>``, ``folder:<id>``,
    ``ceph:<fsid>/<pool>``, ``cinder:<endpoint>/<project>``. A backend whose name
    now points at another storage sees a scope that is not its own and raises
    :class:`~imagebackend.exceptions.ConfigError` for that disk. A storage that gets
    its identity with the first disk says so by :attr:`Placement.new
    <imagebackend.model.Placement.new>`: then the caller refuses to make one where
    disks are recorded.

Rules
=====

* **The recorded format is the only truth.** A guest can write any header onto its
  disk. Never detect a format from bytes.
* **Create is exclusive**, and undo covers only what this call made.
* **Each call may come twice** (after a crash, after a lost answer). The table in
  each method's docstring says what the second one does.
* Only exceptions of :mod:`imagebackend.exceptions` leave a backend, with the
  storage's own reason in the message. *Absent* is said only when the storage
  answered so; a storage that does not answer is
  :class:`~imagebackend.exceptions.StorageUnavailable`.
* Sizes are bytes. Virtual and allocated size never share a field.
* No state that a restart would miss, no global configuration, thread safe. The
  constructor keeps its arguments and has no effect.
* Zeros are skipped in a copy only when the target is known to be blank.

Worked example
==============

Making a disk from an image and giving it to a guest::

    want = Want(size=20 * GiB, role=Role.ROOT, ..., fill="FromImage", image=info)
    placement = backend.plan(want)             # no effect
    gen = Generation(id=..., size=placement.size, format=placement.format,
                     scope=placement.scope, handle=placement.handle, ...)
    # the caller commits a row that says "creating"
    creation = backend.create(gen, FromImage(access), record)
    # the caller commits "ready"; later, on the host that runs the guest:
    connection = backend.connect(gen, connector, record_attachment)
    # ... the guest uses connection.source ...
    backend.disconnect(gen, connection)
    backend.delete(gen)

If the process dies inside ``create``, recovery calls ``delete`` with the
generation and the last handle that was recorded; ``delete`` finds what is there
by handle or by marker, and an object that is not there is success.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.model import (
    Capabilities,
    Connection,
    Connector,
    Copyable,
    Creation,
    Fenced,
    Finding,
    Found,
    Generation,
    Handle,
    ImageAccess,
    Inventory,
    Placement,
    ProgressCallback,
    Secret,
    Snapshot,
    Stat,
    UploadTarget,
    Want,
)

Record = Callable[[Handle], None]


@dataclass(frozen=True, slots=True)
class Blank:
    """Zeros, or an empty file system. ``fs``: ext4, xfs, vfat or swap."""

    fs: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class FromImage:
    """An image's content, grown to the generation's size."""

    image: ImageAccess


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """A snapshot of a generation of the same backend."""

    generation: Generation
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class FromGeneration:
    """The content behind a Source: another generation that the caller connected
    read-only, of any backend, and unlocked if it is encrypted, or a file that the
    caller brought.

    :ivar size: bytes of content.
    :ivar generation: what it is, None for a plain file.
    """

    source: Copyable
    size: int
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class FromRef:
    """Something that exists in this backend's storage, by its own name or id."""

    ref: str


Fill = Blank | FromImage | FromSnapshot | FromGeneration | FromRef


class Backend(abc.ABC):
    """One storage.

    :param name: the operator's name for it: the option group, and what rows hold.
    :param conf: the whole configuration; a backend reads its own group,
        :attr:`options`.
    :param deployment_id: goes into every marker.
    """

    #: Options of this driver; registered in the group that has the backend's name.
    OPTIONS: ClassVar[Sequence[cfg.Opt]] = ()
    #: Whether a flavor's volume type, without a backend's name, means this driver.
    VOLUME_TYPES: ClassVar[bool] = False
    #: Seconds for which :meth:`stat` may still tell of a user that has died. Before a
    #: disk goes, that long is waited for users to vanish.
    lingering: float = 0.0
    #: Whether it can clone an image where it lies: then ``ImageInfo.locations`` says
    #: where that is.
    CLONES_IMAGES: ClassVar[bool] = False
    #: Whether a lost answer can leave a second object with one marker, or a connection
    #: or snapshot that no row has: where the storage gives the names.
    TWINS: ClassVar[bool] = False

    def __init__(self, name: str, conf: cfg.ConfigOpts, deployment_id: str) -> None:
        self.name = name
        self.conf = conf
        self.deployment_id = deployment_id

    @classmethod
    def chosen_options(cls, conf: cfg.ConfigOpts, group: str) -> Sequence[cfg.Opt]:
        """Options that the group has beside :attr:`OPTIONS`, because of a value in
        it."""
        _ = conf, group
        return ()

    @property
    def options(self) -> cfg.ConfigOpts.GroupAttr:
        """This backend's own option group."""
        group: cfg.ConfigOpts.GroupAttr = self.conf[self.name]
        return group

    # --- always ------------------------------------------------------------

    @abc.abstractmethod
    def check(self) -> Sequence[Finding]:
        """Is this backend usable on this host? No effect; never raises for a
        storage that is down, but says so."""

    @abc.abstractmethod
    def capabilities(self, at: Placement | Generation) -> Capabilities:
        """What can be done with this generation, or at this place: they differ by
        pool, volume type and format, not by class."""

    @abc.abstractmethod
    def plan(self, want: Want) -> Placement:
        """Where and how ``want`` would be made. No effect.

        :raises PlacementRefused: pool or type unknown, not allowed, or not able.
        :raises SizeRefused: the size is outside what the storage can hold, or the
            image is larger than the disk.
        :raises NotSupported: shareable, or a fill, that this storage cannot do.
        """

    @abc.abstractmethod
    def create(
        self, gen: Generation, fill: Fill, record: Record, *, auth: Any = None
    ) -> Creation:
        """Make the object: marked, of exact size, filled, flushed, not connected.

        ============ ==========================================================
        before       a row that says *creating* is committed
        after        the object is durable; ``record`` has the whole handle
        again        the same object; never two are left
        failure      what this call made is gone again
        ============ ==========================================================

        :param auth: the caller's keystoneauth plugin, for a storage where what a
            caller gets must be asked for in the caller's name.
        :raises ObjectExists: something that is not ours has the name.
        :raises NoSpace, IntegrityError, ImageRejected, StorageError:
        """

    @abc.abstractmethod
    def delete(self, gen: Generation) -> None:
        """Remove the object, whole or half made.

        ============ ==========================================================
        before       no connection anywhere
        after        gone, with every temporary thing beside it
        again        absent is success; what an earlier call owed is purged
        ============ ==========================================================

        :raises Busy: something has it open; the message says who.
        :raises Debt: it is out of the way, but not all of it could be purged: the
            caller keeps its row, and calls again later.
        """

    @abc.abstractmethod
    def connect(
        self,
        gen: Generation,
        to: Connector,
        record: Record,
        *,
        readonly: bool = False,
    ) -> Connection:
        """Make the generation reachable from this host.

        ============ ==========================================================
        before       filled; one host at a time, unless shareable or handed over
        after        reachable; the attachment was recorded before use
        again        fresh connection info, no second attachment
        ============ ==========================================================

        :raises ObjectMissing: the storage answered that it is not there.
        :raises IntegrityError: it is damaged, as ``stat`` says.
        :raises HostConflict: another host has it.
        """

    @abc.abstractmethod
    def disconnect(self, gen: Generation, conn: Connection) -> None:
        """Let go: host first, then the attachment. Absent is success.

        ``conn.source`` may be stale; ``conn.handle`` is what was recorded.

        :raises HostConflict: the connection is another host's.
        """

    def secrets(self, gen: Generation, conn: Connection) -> Sequence[Secret]:
        """What QEMU must know to open ``conn.source``, where that names a secret, or
        to decrypt it."""
        return ()

    def own_secrets(self, gen: Generation, conn: Connection) -> Sequence[str]:
        """Those of the secrets, by uuid, that are for this generation alone, so that
        libvirt is to forget them when the host lets go of it.

        ``conn.source`` may be stale; ``conn.handle`` is what was recorded.
        """
        return ()

    def guest_size(self, gen: Generation, size: int) -> int:
        """Bytes that a running guest gets of ``size``, which :meth:`resize` returned:
        less, where the object has a header of encryption. This host is connected."""
        return size

    @abc.abstractmethod
    def stat(self, gen: Generation) -> Stat | None:
        """What the storage says; None only if it *answered* that there is nothing.

        :raises StorageUnavailable: it did not answer.
        :raises IntegrityError: it is there, but can be seen to be damaged, as a file
            that is shorter than recorded; ``values["used_by"]`` as in
            :class:`~imagebackend.model.Stat`. It can be deleted all the same.
        """

    @abc.abstractmethod
    def scan(self) -> Iterator[Found]:
        """All objects of this storage that could be disks, as a stream. A foreign
        one, or one of another deployment, is told apart by its marker."""

    @abc.abstractmethod
    def capacity(self) -> Sequence[Inventory]:
        """Room. Starts no child process, opens no object."""

    def scope_of_copies(self, gen: Generation) -> str:
        """Scope of what this library makes of it for its own use, for a while."""
        return gen.scope

    def volume_types(self, project_id: str) -> Sequence[str]:
        """Names of the volume types that a project may use."""
        _ = project_id
        return ()

    def drop_twins(self, gen: Generation, recorded: Sequence[Handle]) -> int:
        """Remove what has the generation's marker beside the object that is recorded,
        and what hangs on that and is not recorded; only what is certainly ours.

        :param recorded: handles of its connections and snapshots.
        :returns: how many there were.
        """
        _ = gen, recorded
        return 0

    def close(self) -> None:
        """Let go of connections and the like; the next call makes them anew."""
        _ = self

    # --- optional: capabilities() said first whether it works ----------------

    def resize(self, gen: Generation, size: int) -> int:
        """Grow to ``size`` bytes; returns the size that ``stat`` gives now, which
        may be more. At that size or above already: success, nothing changes."""
        raise self._cannot("resize", gen.id)

    def snapshot(self, gen: Generation, snap_id: str, record: Record) -> Snapshot:
        """A point in time. Short, no data copied. Again: the same one."""
        raise self._cannot("take a snapshot of", gen.id)

    def delete_snapshot(self, gen: Generation, snap: Snapshot) -> None:
        """Absent is success."""
        raise self._cannot("delete a snapshot of", gen.id)

    def revert(self, gen: Generation, snap: Snapshot) -> None:
        """Size and data are those of the snapshot again."""
        raise self._cannot("revert", gen.id)

    def reimage(self, gen: Generation, fill: FromImage) -> None:
        """Replace the content in place. Destroys before it makes: the caller has
        announced it in the row."""
        raise self._cannot("reimage", gen.id)

    def flatten(
        self, gen: Generation, *, progress: ProgressCallback | None = None
    ) -> None:
        """Give the object its own copy of what it shares with others, so that they
        can go. It may be in use. Shares nothing: success."""
        raise self._cannot("flatten", gen.id)

    def publish(
        self, gen: Generation, snap: Snapshot, into: UploadTarget
    ) -> str | None:
        """Put a snapshot where the image source keeps its images, without moving it
        through the host's files.

        :returns: its location, for the source to register; None: there is no such
            way to there, so stream it.
        """
        return None

    def withdraw(self, gen: Generation, snap: Snapshot, into: UploadTarget) -> None:
        """Remove what :meth:`publish` put there, also half of it: the image source
        has not taken it. Nothing there is success."""
        _ = gen, snap, into

    def fence(self, gen: Generation, host_id: str, conn: Connection) -> Fenced:
        """Cut a host, which the caller judged dead, off from this object."""
        return Fenced.NOT_POSSIBLE

    def adopt(self, ref: str, gen: Generation, record: Record) -> Creation:
        """Take over an existing object without copying. The format comes from the
        caller's metadata (``gen.format``), never from bytes."""
        raise self._cannot("adopt", ref)

    def _cannot(self, verb: str, what: str) -> exc.NotSupported:
        return exc.NotSupported(
            f"backend {self.name!r} cannot {verb} {what}", backend=self.name, what=what
        )
