# SPDX-License-Identifier: Apache-2.0
"""What every action works with, and the steps that several actions share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend.backends.base import (
    Backend,
    Blank,
    Fill,
    FromGeneration,
    FromImage,
    Record,
)
from imagebackend.backends.loader import Backends
from imagebackend.host import Host
from imagebackend.images.access import CachedAccess, load_source
from imagebackend.images.base import ImageSource
from imagebackend.images.cache import ImageCache
from imagebackend.libvirt.secret import undefine
from imagebackend.model import (
    Connection,
    Copyable,
    Creation,
    Disk,
    DiskSpec,
    DiskState,
    FileSource,
    Generation,
    GenerationState,
    Handle,
    ImageInfo,
    Instance,
    Lifecycle,
    Placement,
    ProgressCallback,
    from_json,
)
from imagebackend.selection import Recipe, Selection
from imagebackend.store.operations import Operation, Operations
from imagebackend.store.rows import (
    AttachmentRow,
    DiskRow,
    GenerationRow,
    OwnerRow,
    Reader,
    Store,
    Transaction,
)

LOG = log.getLogger(__name__)
#: Why a disk whose content is being destroyed before there is a new one is what it is.
IN_PLACE = "its content is being replaced in place"


class Context:
    """One host's view. Keeps its argument; everything opens when first used."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self.conf = conf
        self.host = Host(conf)
        self.store = Store(conf)
        self.operations = Operations(self.store, self.host)
        self.backends = Backends(conf, lambda: self.deployment_id)
        self._lock = threading.RLock()
        self._deployment_id: str | None = None
        self._sources: dict[str, ImageSource] = {}
        self._cache: ImageCache | None = None

    @property
    def deployment_id(self) -> str:
        with self._lock:
            if self._deployment_id is None:
                with self.store.reading() as rows:
                    self._deployment_id = rows.meta("deployment_id")
            return self._deployment_id

    @property
    def source(self) -> ImageSource:
        return self.source_of("")

    def source_of(self, name: str) -> ImageSource:
        """The image source of that name, or this host's."""
        name = name or self.conf.imagebackend_images.source
        with self._lock:
            if name not in self._sources:
                self._sources[name] = load_source(self.conf, name)
            return self._sources[name]

    @property
    def cache(self) -> ImageCache:
        with self._lock:
            if self._cache is None:
                self._cache = ImageCache(
                    self.conf,
                    self.host,
                    self._entries_in_use,
                    lambda: self._entries_in_use(made=True),
                )
            return self._cache

    def _entries_in_use(self, *, made: bool = False) -> set[str]:
        with self.store.reading() as rows:
            return rows.entries_in_use(self.host.id, made=made)

    def backend(self, row: GenerationRow) -> Backend:
        """The backend that has the object.

        :raises ConfigError: it is not enabled, or its driver is another one by now.
        """
        backend = self.backends.get(row.backend)
        formats = backend.capabilities(self.generation(row)).formats
        if row.format not in formats:
            driver = self.backends.driver_name(row.backend)
            raise exc.ConfigError(
                f"backend {row.backend!r}: generation {row.id} is recorded as "
                f"{row.format}, but [{row.backend}] driver {driver!r} has only "
                f"{', '.join(formats)}: set the driver that made it, and give another "
                f"one a backend of its own",
                backend=row.backend,
                generation=row.id,
            )
        return backend

    def generation(self, row: GenerationRow) -> Generation:
        return row.generation(self.deployment_id)

    def must_have_base(self, row: GenerationRow) -> None:
        """:raises IntegrityError: the cache entry that it is based on is bad."""
        if row.entry:
            self.cache.must_have(row.entry)

    def image(self, image_id: str, project_id: str, auth: Any = None) -> ImageInfo:
        """What is known of an image; its virtual size too if it is in the cache.

        :raises ImageNotFound: there is none that the project may use.
        """
        info = self.source.get(image_id, auth=auth, project_id=project_id)
        if info.virtual_size is None:
            cached = self.cache.lookup(self.cache.entry_name(info))
            if cached is not None:
                info = dataclasses.replace(info, virtual_size=cached.virtual_size)
        return info

    def selection(
        self,
        auth: Any = None,
        *,
        effects: bool = True,
        backends: Backends | None = None,
    ) -> Selection:
        """:param effects: an image may be copied to where a storage can clone it.
        :param backends: others than this host's loaded ones.
        """
        return Selection(
            self.conf,
            backends or self.backends,
            lambda image_id, project_id: self.image(image_id, project_id, auth),
            self._base_size,
            lambda image: self.source.locations(image, auth=auth, copy=effects),
        )

    def _base_size(self, disk_id: str, project_id: str) -> int:
        with self.store.reading() as rows:
            row = rows.disk(disk_id)
        if row is None or row.project_id != project_id:
            raise exc.DiskNotFound(
                f"base disk {disk_id} is not one of project {project_id!r}",
                disk=disk_id,
            )
        return row.size

    # --- generations ---------------------------------------------------------

    def new_generation(
        self,
        disk_id: str,
        disk_name: str,
        instance_id: str | None,
        project_id: str,
        recipe: Recipe,
        placement: Placement,
        operation_id: str,
        image: ImageInfo | None,
    ) -> GenerationRow:
        """The row that precedes the object."""
        return GenerationRow(
            id=str(uuid.uuid4()),
            disk_id=disk_id,
            disk_name=disk_name,
            instance_id=instance_id,
            project_id=project_id,
            host_id=self.host.id,
            state=GenerationState.NEW,
            operation_id=operation_id,
            backend=placement.backend,
            scope=placement.scope,
            size=placement.size,
            format=placement.format,
            shareable=recipe.shareable,
            handle=placement.handle,
            entry=(
                self.cache.entry_name(image)
                if placement.uses_cache and image is not None
                else ""
            ),
            image=recipe.image,
        )

    def make(
        self,
        row: GenerationRow,
        recipe: Recipe,
        image: ImageInfo | None,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> Creation:
        """Create the object of a committed row. What came of it is for the caller to
        commit, with whatever else becomes true at the same moment."""
        with self.fill(row, recipe, image, auth, progress) as fill:
            return self.backend(row).create(
                self.generation(row), fill, self.recorder(row), auth=auth
            )

    def recorder(self, row: GenerationRow) -> Record:
        def record(handle: Handle) -> None:
            with self.store.writing() as tx:
                tx.update_generation(row.id, handle=dict(handle))

        return record

    @contextlib.contextmanager
    def fill(
        self,
        row: GenerationRow,
        recipe: Recipe,
        image: ImageInfo | None,
        auth: Any,
        progress: ProgressCallback | None,
    ) -> Iterator[Fill]:
        if image is not None:
            yield FromImage(
                CachedAccess(
                    self.source,
                    self.cache,
                    image,
                    limit=row.size,
                    auth=auth,
                    progress=progress,
                )
            )
        elif recipe.base is not None:
            with self._base(recipe.base, row) as (content, size, generation):
                yield FromGeneration(content, size, generation)
        elif recipe.path is not None:
            source = FileSource(recipe.path, "raw")
            yield FromGeneration(source, row.size)
        else:
            yield Blank(recipe.fs, recipe.label)

    @contextlib.contextmanager
    def _base(
        self, disk_id: str, row: GenerationRow
    ) -> Iterator[tuple[Copyable, int, Generation]]:
        """An existing disk, connected read-only while the row's object is made."""
        with self.store.reading() as rows:
            disk = rows.disk(disk_id)
            if disk is None or disk.generation_id is None:
                raise exc.DiskNotFound(
                    f"base disk {disk_id} is not recorded", disk=disk_id
                )
            base = rows.generation(disk.generation_id)
            attached = rows.attachments(disk.generation_id)
        if base is None or attached:
            raise exc.Busy(
                f"base disk {disk_id} is connected: disconnect it first, so that one "
                f"point in time is copied",
                disk=disk_id,
            )
        with self.borrowed(base, row.operation_id, row.instance_id or row.id) as source:
            yield source, disk.size, self.generation(base)

    @contextlib.contextmanager
    def borrowed(
        self, row: GenerationRow, operation_id: str | None, instance_id: str
    ) -> Iterator[Copyable]:
        """An object, connected read-only to this host for the block; an operation that
        dies meanwhile has it in its rows."""
        attachment = AttachmentRow(
            row.id,
            self.host.id,
            instance_id,
            {},
            operation_id=operation_id,
            readonly=True,
        )
        with self.store.writing() as tx:
            tx.insert(attachment)
        try:
            yield self.copyable(row, self.connect(row, attachment))
        finally:
            self.disconnect(attachment)

    # --- connections ---------------------------------------------------------

    def connect(self, row: GenerationRow, attachment: AttachmentRow) -> Connection:
        """Connect for a committed attachment row; again gives fresh info."""
        self.must_have_base(row)

        def record(handle: Handle) -> None:
            with self.store.writing() as tx:
                tx.update_attachment(attachment, handle=dict(handle))

        return self.backend(row).connect(
            self.generation(row),
            self.host.connector,
            record,
            readonly=attachment.readonly,
        )

    def copyable(self, row: GenerationRow, connection: Connection) -> Copyable:
        """What was connected, for this host's own copies."""
        if connection.encryption is None:
            return connection.source
        secrets = self.backend(row).secrets(self.generation(row), connection)
        return connection.copyable(secrets)

    def disconnect(self, attachment: AttachmentRow) -> None:
        """Let go on this host: storage first, then libvirt's secret, then the row."""
        if attachment.host_id != self.host.id:
            raise exc.HostConflict(
                f"generation {attachment.generation_id} is connected to host "
                f"{attachment.host_id}: only that host can let go of it",
                host=attachment.host_id,
                generation=attachment.generation_id,
            )
        with self.store.reading() as rows:
            row = rows.generation(attachment.generation_id)
            others = [
                other
                for other in rows.attachments(attachment.generation_id)
                if other.host_id == attachment.host_id
                and other.instance_id != attachment.instance_id
            ]
        if row is not None and not others:
            # The source is not needed to let go, and may be stale by now.
            stale = Connection(
                FileSource("/", row.format), attachment.host_id, attachment.handle
            )
            backend, generation = self.backend(row), self.generation(row)
            backend.disconnect(generation, stale)
            # Of an attachment that is an operation's own no guest was told.
            if attachment.operation_id is None:
                # Without its library nobody can have been given one.
                with contextlib.suppress(exc.MissingDependency):
                    for each in backend.own_secrets(generation, stale):
                        undefine(self.conf, each)
        with self.store.writing() as tx:
            tx.delete(attachment)

    # --- what the caller sees ------------------------------------------------

    def disk(self, rows: Reader, row: DiskRow, owner: OwnerRow | None) -> Disk:
        current = rows.generation(row.generation_id) if row.generation_id else None
        owners = [each.instance_id for each in rows.owners(row.id)]
        attached = rows.attachments(row.generation_id) if row.generation_id else []
        instance = rows.instance(owner.instance_id) if owner else None
        goes_with_it = row.lifecycle is Lifecycle.EPHEMERAL and not row.shareable
        return Disk(
            id=row.id,
            name=owner.name if owner else row.name,
            instance_id=owner.instance_id if owner else None,
            project_id=row.project_id,
            role=row.role,
            lifecycle=row.lifecycle,
            state=row.state,
            size=row.size,
            backend=current.backend if current else "",
            format=current.format if current else "",
            shareable=row.shareable,
            bus=owner.bus if owner else "",
            device=owner.device if owner else "",
            cdrom=row.cdrom,
            tainted=instance is not None and instance.tainted and goes_with_it,
            connected=any(
                owner is None or each.instance_id == owner.instance_id
                for each in attached
            ),
            owners=tuple(owners),
            generation_id=row.generation_id,
            handle=current.handle if current else {},
            image=row.image,
            reason=row.reason,
            operation=row.operation_id or "",
        )


def recipe_of(row: DiskRow) -> Recipe:
    return from_json(Recipe, row.spec)


def instance_of(request: str) -> Instance:
    """The instance in a recorded request."""
    return from_json(Instance, json.loads(request)["instance"])


def specs_of(request: str) -> list[DiskSpec]:
    """The disk specs in a recorded request."""
    return [from_json(DiskSpec, each) for each in json.loads(request)["disks"]]


def free(row: DiskRow, verb: str) -> DiskRow:
    """:raises Busy, Conflict: the disk is not settled, or needs a person."""
    if row.operation_id is not None:
        raise exc.Busy(
            f"cannot {verb} disk {row.id}: it is {row.state}, by operation "
            f"{row.operation_id}",
            disk=row.id,
            operation=row.operation_id,
        )
    # A rebuild replaces whatever is wrong with a disk.
    if row.state is DiskState.FAILED and verb not in ("destroy", "delete", "rebuild"):
        raise exc.Conflict(
            f"cannot {verb} disk {row.id}: it failed ({row.reason}): rebuild or "
            f"destroy its instance, or delete the disk if none has it",
            disk=row.id,
            reason=row.reason,
        )
    return row


def hold(
    tx: Transaction, row: DiskRow, state: DiskState, operation: Operation
) -> DiskRow:
    """Into a running state; ``back`` says which one it came from."""
    return tx.update_disk(
        row,
        state=state,
        back=str(row.state),
        operation_id=operation.id,
        reason=row.reason if row.state is DiskState.FAILED else "",
    )


def commit_creation(
    tx: Transaction, row: GenerationRow, creation: Creation, **changes: Any
) -> None:
    """What the storage made, into the generation's row."""
    values: dict[str, Any] = {
        "handle": creation.handle,
        "size": creation.size,
        "format": creation.format,
        "path": str(creation.path),
        "scope": creation.scope or row.scope,
    }
    tx.update_generation(row.id, **(values | changes))


def settle_disk(tx: Transaction, row: DiskRow, **changes: Any) -> DiskRow:
    """Back to the settled state that it came from, or as the changes say."""
    values: dict[str, Any] = {
        "state": DiskState(row.back or DiskState.READY),
        "back": "",
        "operation_id": None,
    }
    return tx.update_disk(row, **(values | changes))


Settle = Callable[[Operation], None]
