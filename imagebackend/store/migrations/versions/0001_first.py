# SPDX-License-Identifier: Apache-2.0
"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None

_ID = sa.String(36)
_NAME = sa.String(64)
_JSON = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("key", _NAME, nullable=False),
        sa.Column("value", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_meta"),
    )
    op.create_table(
        "hosts",
        sa.Column("id", _ID, nullable=False),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hosts"),
    )
    op.create_table(
        "instances",
        sa.Column("id", _ID, nullable=False),
        sa.Column("project_id", sa.String(255), nullable=False),
        sa.Column("host_id", _ID, nullable=False),
        sa.Column("request", _JSON, nullable=False),
        sa.Column("tainted", sa.Boolean, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_instances"),
    )
    op.create_table(
        "disks",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("project_id", sa.String(255), nullable=False),
        sa.Column("host_id", _ID, nullable=False),
        sa.Column("role", _NAME, nullable=False),
        sa.Column("lifecycle", _NAME, nullable=False),
        sa.Column("state", _NAME, nullable=False),
        sa.Column("back", _NAME, nullable=False),
        sa.Column("operation_id", _ID),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("shareable", sa.Boolean, nullable=False),
        sa.Column("cdrom", sa.Boolean, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("image", sa.String(255)),
        sa.Column("spec", _JSON, nullable=False),
        sa.Column("generation_id", _ID),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_disks"),
    )
    op.create_index("ix_disks_host_id", "disks", ["host_id"])
    op.create_index("ix_disks_state", "disks", ["state"])
    op.create_index("ix_disks_operation_id", "disks", ["operation_id"])
    op.create_table(
        "owners",
        sa.Column("disk_id", _ID, nullable=False),
        sa.Column("instance_id", _ID, nullable=False),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("bus", _NAME, nullable=False),
        sa.Column("device", _NAME, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("disk_id", "instance_id", name="pk_owners"),
        sa.UniqueConstraint("instance_id", "name", name="uq_owners_instance_id_name"),
        sa.UniqueConstraint(
            "instance_id", "device", name="uq_owners_instance_id_device"
        ),
    )
    op.create_table(
        "generations",
        sa.Column("id", _ID, nullable=False),
        sa.Column("disk_id", _ID),
        sa.Column("disk_name", _NAME, nullable=False),
        sa.Column("instance_id", _ID),
        sa.Column("project_id", sa.String(255), nullable=False),
        sa.Column("host_id", _ID, nullable=False),
        sa.Column("state", _NAME, nullable=False),
        sa.Column("operation_id", _ID),
        sa.Column("backend", sa.String(255), nullable=False),
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("format", _NAME, nullable=False),
        sa.Column("shareable", sa.Boolean, nullable=False),
        sa.Column("handle", _JSON, nullable=False),
        sa.Column("entry", sa.String(255), nullable=False),
        sa.Column("image", sa.String(255)),
        sa.Column("path", _NAME, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_generations"),
    )
    for column in ("disk_id", "state", "operation_id", "entry"):
        op.create_index(f"ix_generations_{column}", "generations", [column])
    op.create_table(
        "attachments",
        sa.Column("generation_id", _ID, nullable=False),
        sa.Column("host_id", _ID, nullable=False),
        sa.Column("instance_id", _ID, nullable=False),
        sa.Column("operation_id", _ID),
        sa.Column("readonly", sa.Boolean, nullable=False),
        sa.Column("handle", _JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint(
            "generation_id", "host_id", "instance_id", name="pk_attachments"
        ),
    )
    op.create_table(
        "snapshots",
        sa.Column("id", _ID, nullable=False),
        sa.Column("generation_id", _ID, nullable=False),
        sa.Column("operation_id", _ID),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("handle", _JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_snapshots"),
    )
    op.create_index("ix_snapshots_generation_id", "snapshots", ["generation_id"])
    op.create_index("ix_snapshots_operation_id", "snapshots", ["operation_id"])
    op.create_table(
        "operations",
        sa.Column("id", _ID, nullable=False),
        sa.Column("verb", _NAME, nullable=False),
        sa.Column("target", _ID, nullable=False),
        sa.Column("host_id", _ID, nullable=False),
        sa.Column("boot_id", _ID, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("detail", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_operations"),
        sa.UniqueConstraint("target", name="uq_operations_target"),
    )
    op.create_index("ix_operations_host_id", "operations", ["host_id"])
