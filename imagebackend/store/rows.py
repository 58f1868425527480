# SPDX-License-Identifier: Apache-2.0
"""Rows in and out: typed, one transaction each, compare-and-swap on a version."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend import model
from imagebackend.model import (
    DiskState,
    Generation,
    GenerationState,
    Handle,
    Lifecycle,
    Role,
    Snapshot,
)
from imagebackend.store import schema as t
from imagebackend.store.db import Database

_PAGE = 500

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class HostRow:
    """A host that has used the store. Its name is for people only."""

    id: str
    hostname: str


@dataclass(frozen=True, slots=True)
class InstanceRow:
    id: str
    project_id: str
    host_id: str
    request: str
    tainted: bool = False
    version: int = 1
    created_at: float = dataclasses.field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class DiskRow:
    id: str
    name: str
    project_id: str
    host_id: str
    role: Role
    lifecycle: Lifecycle
    state: DiskState
    size: int
    spec: Mapping[str, Any]
    back: str = ""
    operation_id: str | None = None
    reason: str = ""
    shareable: bool = False
    cdrom: bool = False
    image: str | None = None
    generation_id: str | None = None
    version: int = 1
    created_at: float = dataclasses.field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class OwnerRow:
    disk_id: str
    instance_id: str
    name: str
    bus: str
    device: str
    position: int


@dataclass(frozen=True, slots=True)
class GenerationRow:
    id: str
    disk_id: str | None
    disk_name: str
    instance_id: str | None
    project_id: str
    host_id: str
    state: GenerationState
    backend: str
    scope: str
    size: int
    format: str
    handle: Handle
    operation_id: str | None = None
    shareable: bool = False
    entry: str = ""
    image: str | None = None
    path: str = ""
    reason: str = ""
    created_at: float = dataclasses.field(default_factory=time.time)

    def generation(self, deployment_id: str) -> Generation:
        """What a backend sees of it."""
        return Generation(
            id=self.id,
            disk_id=self.disk_id or "",
            disk_name=self.disk_name,
            instance_id=self.instance_id,
            deployment_id=deployment_id,
            project_id=self.project_id,
            backend=self.backend,
            scope=self.scope,
            size=self.size,
            format=self.format,
            shareable=self.shareable,
            handle=self.handle,
        )


@dataclass(frozen=True, slots=True)
class AttachmentRow:
    generation_id: str
    host_id: str
    instance_id: str
    handle: Handle
    operation_id: str | None = None
    readonly: bool = False
    created_at: float = dataclasses.field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    id: str
    generation_id: str
    size: int
    handle: Handle
    operation_id: str | None = None
    created_at: float = dataclasses.field(default_factory=time.time)

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.id, self.generation_id, self.size, self.handle)


@dataclass(frozen=True, slots=True)
class OperationRow:
    id: str
    verb: str
    target: str
    host_id: str
    boot_id: str
    pid: int
    detail: Mapping[str, Any]
    started_at: float = dataclasses.field(default_factory=time.time)


_TABLES: dict[type, sa.Table] = {
    HostRow: t.hosts,
    InstanceRow: t.instances,
    DiskRow: t.disks,
    OwnerRow: t.owners,
    GenerationRow: t.generations,
    AttachmentRow: t.attachments,
    SnapshotRow: t.snapshots,
    OperationRow: t.operations,
}
_JSON_COLUMNS = frozenset({"spec", "handle", "detail"})
_ENUMS: dict[tuple[type, str], type] = {
    (DiskRow, "role"): Role,
    (DiskRow, "lifecycle"): Lifecycle,
    (DiskRow, "state"): DiskState,
    (GenerationRow, "state"): GenerationState,
}

Row = (
    HostRow
    | InstanceRow
    | DiskRow
    | OwnerRow
    | GenerationRow
    | AttachmentRow
    | SnapshotRow
    | OperationRow
)


def _out(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: model.dumps(value)
        if key in _JSON_COLUMNS
        else value.value
        if isinstance(value, DiskState | GenerationState | Role | Lifecycle)
        else value
        for key, value in values.items()
    }


def _in(cls: type[R], row: sa.Row[Any]) -> R:
    values = {}
    for key, value in row._mapping.items():
        try:
            if key in _JSON_COLUMNS:
                value = json.loads(value)
            elif (cls, key) in _ENUMS:
                value = _ENUMS[cls, key](value)
        except ValueError:
            raise _damaged(_TABLES[cls].name, row, key, value) from None
        values[key] = value
    return cls(**values)


def _damaged(table: str, row: sa.Row[Any], key: str, value: object) -> exc.StoreError:
    identity = {name: row._mapping[name] for name in row._mapping if "id" in name}
    return exc.StoreError(
        f"the store's table {table} holds a row that cannot be read: {key} is "
        f"{str(value)[:80]!r}, of {identity}",
        table=table,
        column=key,
    )


#: A row that is changed by compare-and-swap.
V = TypeVar("V", "InstanceRow", "DiskRow")


class Reader:
    """Reads on one connection."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection

    def _one(self, cls: type[R], **keys: object) -> R | None:
        found = self._all(cls, **keys)
        if len(found) > 1:
            raise exc.InternalError(f"{len(found)} rows of {keys}")
        return found[0] if found else None

    def _all(self, cls: type[R], **keys: object) -> list[R]:
        kind: Any = cls
        rows = self._execute(_select(kind, tuple(keys)), keys)
        return [_in(cls, row) for row in rows]

    def _execute(
        self, statement: sa.Executable, values: Mapping[str, object]
    ) -> sa.CursorResult[Any]:
        return self.connection.execute(statement, values)

    def meta(self, key: str) -> str:
        value = self.connection.execute(
            sa.select(t.meta.c.value).where(t.meta.c.key == key)
        ).scalar_one_or_none()
        if value is None:
            raise exc.StoreError(
                f"the store has no {key}: run `imagebackend db upgrade`", key=key
            )
        return str(value)

    def host(self, host_id: str) -> HostRow | None:
        return self._one(HostRow, id=host_id)

    def host_name(self, host_id: str) -> str:
        """A host for a message: its id, and its name if it is known."""
        row = self.host(host_id)
        return f"{host_id} ({row.hostname})" if row else host_id

    def instance(self, instance_id: str) -> InstanceRow | None:
        return self._one(InstanceRow, id=instance_id)

    def disk(self, disk_id: str) -> DiskRow | None:
        return self._one(DiskRow, id=disk_id)

    def owners(self, disk_id: str) -> list[OwnerRow]:
        return self._all(OwnerRow, disk_id=disk_id)

    def owned(self, instance_id: str) -> list[tuple[OwnerRow, DiskRow]]:
        """An instance's disks, in the order that the guest sees them."""
        mine = self._all(OwnerRow, instance_id=instance_id)
        if not mine:
            return []
        ids = [owner.disk_id for owner in mine]
        rows = self._execute(_DISKS_BY_ID, {"ids": ids})
        found = {row.id: row for row in (_in(DiskRow, each) for each in rows)}
        mine.sort(key=lambda owner: owner.position)
        for owner in mine:
            if owner.disk_id not in found:
                raise exc.StoreError(
                    f"the store says that instance {instance_id} has disk "
                    f"{owner.disk_id}, but has no row of that disk",
                    instance=instance_id,
                    disk=owner.disk_id,
                )
        return [(owner, found[owner.disk_id]) for owner in mine]

    def generation(self, generation_id: str) -> GenerationRow | None:
        return self._one(GenerationRow, id=generation_id)

    def generations(self, disk_id: str) -> list[GenerationRow]:
        return self._all(GenerationRow, disk_id=disk_id)

    def generations_of(self, operation_id: str) -> list[GenerationRow]:
        return self._all(GenerationRow, operation_id=operation_id)

    def debts(self, host_id: str) -> list[GenerationRow]:
        return self._all(
            GenerationRow, state=GenerationState.DEBT.value, host_id=host_id
        )

    def places(self, host_id: str) -> list[GenerationRow]:
        """Where this host's disks are recorded: of each backend, scope and format
        one generation."""
        columns = t.generations.c
        some = (
            sa.select(sa.func.min(columns.id))
            .where(
                columns.host_id == host_id,
                columns.state != GenerationState.NEW.value,
            )
            .group_by(columns.backend, columns.scope, columns.format)
        )
        rows = self.connection.execute(
            sa.select(t.generations)
            .where(columns.id.in_(some))
            .order_by(columns.backend, columns.scope)
        )
        return [_in(GenerationRow, row) for row in rows]

    def entries_in_use(self, host_id: str, *, made: bool = False) -> set[str]:
        """Cache entries that generations of this host's store go on needing.

        :param made: leave out those that have recorded nothing of an object yet.
        """
        columns = t.generations.c
        wanted = [columns.entry != "", columns.host_id == host_id]
        if made:
            new = columns.state == GenerationState.NEW.value
            wanted.append(sa.not_(new & (columns.handle == model.dumps({}))))
        rows = self.connection.execute(
            sa.select(columns.entry).where(*wanted).distinct()
        )
        return {str(row[0]) for row in rows}

    def attachments(self, generation_id: str) -> list[AttachmentRow]:
        return self._all(AttachmentRow, generation_id=generation_id)

    def attachments_of(self, operation_id: str) -> list[AttachmentRow]:
        return self._all(AttachmentRow, operation_id=operation_id)

    def snapshot(self, snapshot_id: str) -> SnapshotRow | None:
        return self._one(SnapshotRow, id=snapshot_id)

    def snapshots(self, generation_id: str) -> list[SnapshotRow]:
        return self._all(SnapshotRow, generation_id=generation_id)

    def snapshots_of(self, operation_id: str) -> list[SnapshotRow]:
        return self._all(SnapshotRow, operation_id=operation_id)

    def disks_of(self, operation_id: str) -> list[DiskRow]:
        return self._all(DiskRow, operation_id=operation_id)

    def operations(self, host_id: str | None = None) -> list[OperationRow]:
        if host_id is None:
            return self._all(OperationRow)
        return self._all(OperationRow, host_id=host_id)

    def operation(self, target: str) -> OperationRow | None:
        return self._one(OperationRow, target=target)


class Transaction(Reader):
    """Reads and writes that are committed together, or not at all."""

    def insert(self, *rows: Row) -> None:
        """:raises sqlalchemy.exc.IntegrityError: a key is taken."""
        for row in rows:
            kind: Any = type(row)
            values = {name: getattr(row, name) for name in _fields(kind)}
            self._execute(_INSERTS[kind], _out(values))

    def update_disk(self, row: DiskRow, **changes: Any) -> DiskRow:
        """Compare-and-swap. :raises Superseded: the row has moved."""
        return self._swap(row, f"disk {row.id}", changes)

    def update_instance(self, row: InstanceRow, **changes: Any) -> InstanceRow:
        """Compare-and-swap. :raises Superseded: the row has moved."""
        return self._swap(row, f"instance {row.id}", changes)

    def update_generation(self, generation_id: str, **changes: Any) -> None:
        """:raises Superseded: the row is gone."""
        self._must_hit(
            GenerationRow, f"generation {generation_id}", changes, id=generation_id
        )

    def update_attachment(self, row: AttachmentRow, **changes: Any) -> None:
        """:raises Superseded: the row is gone."""
        what = f"the attachment of generation {row.generation_id}"
        self._must_hit(AttachmentRow, what, changes, **_identity(row))

    def update_snapshot(self, snapshot_id: str, **changes: Any) -> None:
        """:raises Superseded: the row is gone."""
        self._must_hit(SnapshotRow, f"snapshot {snapshot_id}", changes, id=snapshot_id)

    def delete(self, *rows: Row) -> None:
        """Rows that are gone already: nothing."""
        for row in rows:
            kind: Any = type(row)
            keys = _identity(row)
            self._execute(_delete(kind, tuple(keys)), keys)

    def _swap(self, row: V, what: str, changes: dict[str, Any]) -> V:
        version = row.version + 1
        hit = self._update(
            type(row), changes | {"version": version}, id=row.id, version=row.version
        )
        if not hit:
            raise exc.Superseded(
                f"{what} was changed by another operation meanwhile", what=what
            )
        return dataclasses.replace(row, **changes, version=version)

    def _must_hit(
        self, cls: Any, what: str, changes: dict[str, Any], **keys: object
    ) -> None:
        if not self._update(cls, changes, **keys):
            raise exc.Superseded(f"{what} was taken over meanwhile", what=what)

    def _update(self, cls: Any, changes: dict[str, Any], **keys: object) -> bool:
        statement = _update(cls, tuple(keys), tuple(changes))
        values = _out(changes) | {f"key_{name}": value for name, value in keys.items()}
        return self._execute(statement, values).rowcount == 1


# Statements are made once: SQLAlchemy takes longer to make one than SQLite to run it.

_INSERTS = {cls: sa.insert(table) for cls, table in _TABLES.items()}
_DISKS_BY_ID = sa.select(t.disks).where(
    t.disks.c.id.in_(sa.bindparam("ids", expanding=True))
)


@functools.cache
def _fields(cls: Any) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(cls))


@functools.cache
def _select(cls: Any, keys: tuple[str, ...]) -> sa.Select[Any]:
    table = _TABLES[cls]
    return sa.select(table).where(*(table.c[key] == sa.bindparam(key) for key in keys))


@functools.cache
def _update(cls: Any, keys: tuple[str, ...], changes: tuple[str, ...]) -> sa.Update:
    table = _TABLES[cls]
    return (
        sa.update(table)
        .where(*(table.c[key] == sa.bindparam(f"key_{key}") for key in keys))
        .values({change: sa.bindparam(change) for change in changes})
    )


@functools.cache
def _delete(cls: Any, keys: tuple[str, ...]) -> sa.Delete:
    table = _TABLES[cls]
    return sa.delete(table).where(*(table.c[key] == sa.bindparam(key) for key in keys))


def _identity(row: Row) -> dict[str, object]:
    """The columns that tell the row from all others."""
    if isinstance(row, AttachmentRow):
        names: tuple[str, ...] = ("generation_id", "host_id", "instance_id")
    elif isinstance(row, OwnerRow):
        names = ("disk_id", "instance_id")
    else:
        names = ("id",)
    return {name: getattr(row, name) for name in names}


class Store:
    """The rows of this deployment. Keeps its argument; opens when first used."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self.database = Database(conf)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        with self.database.reading() as connection:
            yield Reader(connection)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Transaction]:
        with self.database.writing() as connection:
            yield Transaction(connection)

    def disk_pages(self) -> Iterator[Sequence[DiskRow]]:
        """All disks, a page at a time: memory does not grow with their number."""
        yield from self._pages(DiskRow, t.disks.c.id)

    def generation_pages(self) -> Iterator[Sequence[GenerationRow]]:
        yield from self._pages(GenerationRow, t.generations.c.id)

    def _pages(self, cls: type[R], key: sa.Column[str]) -> Iterator[Sequence[R]]:
        last = ""
        while True:
            with self.database.reading() as connection:
                rows = connection.execute(
                    sa.select(_TABLES[cls]).where(key > last).order_by(key).limit(_PAGE)
                ).all()
            if not rows:
                return
            yield [_in(cls, row) for row in rows]
            last = rows[-1]._mapping["id"]

    def close(self) -> None:
        self.database.close()
