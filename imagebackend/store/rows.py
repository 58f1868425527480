# SPDX-License-Identifier: Apache-2.0
"""Rows in and out: typed, one transaction each, compare-and-swap on a version."""

from __future__ import annotations

import contextlib
import dataclasses
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
)
from imagebackend.store import schema as t
from imagebackend.store.db import Database

_PAGE = 500

R = TypeVar("R")


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
    InstanceRow
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
        if key in _JSON_COLUMNS:
            value = json.loads(value)
        elif (cls, key) in _ENUMS:
            value = _ENUMS[cls, key](value)
        values[key] = value
    return cls(**values)


class Reader:
    """Reads on one connection."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection

    def _one(self, cls: type[R], *where: sa.ColumnElement[bool]) -> R | None:
        row = self.connection.execute(
            sa.select(_TABLES[cls]).where(*where)
        ).one_or_none()
        return None if row is None else _in(cls, row)

    def _all(self, cls: type[R], *where: sa.ColumnElement[bool]) -> list[R]:
        rows = self.connection.execute(sa.select(_TABLES[cls]).where(*where))
        return [_in(cls, row) for row in rows]

    def meta(self, key: str) -> str:
        value = self.connection.execute(
            sa.select(t.meta.c.value).where(t.meta.c.key == key)
        ).scalar_one_or_none()
        if value is None:
            raise exc.StoreError(
                f"the store has no {key}: run `imagebackend db upgrade`", key=key
            )
        return str(value)

    def instance(self, instance_id: str) -> InstanceRow | None:
        return self._one(InstanceRow, t.instances.c.id == instance_id)

    def disk(self, disk_id: str) -> DiskRow | None:
        return self._one(DiskRow, t.disks.c.id == disk_id)

    def owners(self, disk_id: str) -> list[OwnerRow]:
        return self._all(OwnerRow, t.owners.c.disk_id == disk_id)

    def owned(self, instance_id: str) -> list[tuple[OwnerRow, DiskRow]]:
        """An instance's disks, in the order that the guest sees them."""
        mine = self._all(OwnerRow, t.owners.c.instance_id == instance_id)
        if not mine:
            return []
        found = {
            row.id: row
            for row in self._all(DiskRow, t.disks.c.id.in_([o.disk_id for o in mine]))
        }
        mine.sort(key=lambda owner: owner.position)
        return [(owner, found[owner.disk_id]) for owner in mine]

    def generation(self, generation_id: str) -> GenerationRow | None:
        return self._one(GenerationRow, t.generations.c.id == generation_id)

    def generations(self, disk_id: str) -> list[GenerationRow]:
        return self._all(GenerationRow, t.generations.c.disk_id == disk_id)

    def generations_of(self, operation_id: str) -> list[GenerationRow]:
        return self._all(GenerationRow, t.generations.c.operation_id == operation_id)

    def debts(self, host_id: str) -> list[GenerationRow]:
        return self._all(
            GenerationRow,
            t.generations.c.state == GenerationState.DEBT.value,
            t.generations.c.host_id == host_id,
        )

    def entries_in_use(self, host_id: str) -> set[str]:
        """Cache entries that generations of this host's store go on needing."""
        rows = self.connection.execute(
            sa.select(t.generations.c.entry)
            .where(t.generations.c.entry != "", t.generations.c.host_id == host_id)
            .distinct()
        )
        return {str(row[0]) for row in rows}

    def attachments(self, generation_id: str) -> list[AttachmentRow]:
        return self._all(AttachmentRow, t.attachments.c.generation_id == generation_id)

    def attachments_of(self, operation_id: str) -> list[AttachmentRow]:
        return self._all(AttachmentRow, t.attachments.c.operation_id == operation_id)

    def snapshot(self, snapshot_id: str) -> SnapshotRow | None:
        return self._one(SnapshotRow, t.snapshots.c.id == snapshot_id)

    def snapshots_of(self, operation_id: str) -> list[SnapshotRow]:
        return self._all(SnapshotRow, t.snapshots.c.operation_id == operation_id)

    def disks_of(self, operation_id: str) -> list[DiskRow]:
        return self._all(DiskRow, t.disks.c.operation_id == operation_id)

    def operations(self, host_id: str | None = None) -> list[OperationRow]:
        if host_id is None:
            return self._all(OperationRow)
        return self._all(OperationRow, t.operations.c.host_id == host_id)

    def operation(self, target: str) -> OperationRow | None:
        return self._one(OperationRow, t.operations.c.target == target)


class Transaction(Reader):
    """Reads and writes that are committed together, or not at all."""

    def insert(self, *rows: Row) -> None:
        """:raises sqlalchemy.exc.IntegrityError: a key is taken."""
        for row in rows:
            values = {
                item.name: getattr(row, item.name) for item in dataclasses.fields(row)
            }
            self.connection.execute(sa.insert(_TABLES[type(row)]).values(_out(values)))

    def update_disk(self, row: DiskRow, **changes: Any) -> DiskRow:
        """Compare-and-swap. :raises Superseded: the row has moved."""
        done = self.connection.execute(
            sa.update(t.disks)
            .where(t.disks.c.id == row.id, t.disks.c.version == row.version)
            .values(_out(changes) | {"version": row.version + 1})
        )
        if done.rowcount != 1:
            raise exc.Superseded(
                f"disk {row.id} was changed by another operation meanwhile",
                disk=row.id,
            )
        return dataclasses.replace(row, **changes, version=row.version + 1)

    def update_instance(self, row: InstanceRow, **changes: Any) -> InstanceRow:
        """Compare-and-swap. :raises Superseded: the row has moved."""
        done = self.connection.execute(
            sa.update(t.instances)
            .where(t.instances.c.id == row.id, t.instances.c.version == row.version)
            .values(_out(changes) | {"version": row.version + 1})
        )
        if done.rowcount != 1:
            raise exc.Superseded(
                f"instance {row.id} was changed by another operation meanwhile",
                instance=row.id,
            )
        return dataclasses.replace(row, **changes, version=row.version + 1)

    def update_generation(self, generation_id: str, **changes: Any) -> None:
        """:raises Superseded: the row is gone."""
        self._must_hit(
            sa.update(t.generations)
            .where(t.generations.c.id == generation_id)
            .values(_out(changes)),
            f"generation {generation_id}",
        )

    def update_attachment(self, row: AttachmentRow, **changes: Any) -> None:
        """:raises Superseded: the row is gone."""
        self._must_hit(
            sa.update(t.attachments).where(*_attachment(row)).values(_out(changes)),
            f"the attachment of generation {row.generation_id}",
        )

    def update_snapshot(self, snapshot_id: str, **changes: Any) -> None:
        self._must_hit(
            sa.update(t.snapshots)
            .where(t.snapshots.c.id == snapshot_id)
            .values(_out(changes)),
            f"snapshot {snapshot_id}",
        )

    def update_operation(self, operation_id: str, **changes: Any) -> None:
        self._must_hit(
            sa.update(t.operations)
            .where(t.operations.c.id == operation_id)
            .values(_out(changes)),
            f"operation {operation_id}",
        )

    def _must_hit(self, statement: sa.Update, what: str) -> None:
        if self.connection.execute(statement).rowcount != 1:
            raise exc.Superseded(f"{what} was taken over meanwhile", what=what)

    def delete(self, *rows: Row) -> None:
        for row in rows:
            self.connection.execute(
                sa.delete(_TABLES[type(row)]).where(*_identity(row))
            )


def _attachment(row: AttachmentRow) -> Sequence[sa.ColumnElement[bool]]:
    return (
        t.attachments.c.generation_id == row.generation_id,
        t.attachments.c.host_id == row.host_id,
        t.attachments.c.instance_id == row.instance_id,
    )


def _identity(row: Row) -> Sequence[sa.ColumnElement[bool]]:
    if isinstance(row, AttachmentRow):
        return _attachment(row)
    if isinstance(row, OwnerRow):
        return (
            t.owners.c.disk_id == row.disk_id,
            t.owners.c.instance_id == row.instance_id,
        )
    return (_TABLES[type(row)].c.id == row.id,)


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
