# SPDX-License-Identifier: Apache-2.0
"""The tables. Alembic revisions in ``migrations`` make them; a test keeps both
equal."""

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

#: The revision that this code works with.
REVISION = "0001"

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

_ID = sa.String(36)
_NAME = sa.String(64)
#: MariaDB's TEXT ends at 64 KiB, which a request with large extra specs may pass.
_JSON = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", _NAME, primary_key=True),
    sa.Column("value", sa.String(255), nullable=False),
)

hosts = sa.Table(
    "hosts",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("hostname", sa.String(255), nullable=False),
)

instances = sa.Table(
    "instances",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("project_id", sa.String(255), nullable=False),
    sa.Column("host_id", _ID, nullable=False),
    sa.Column("request", _JSON, nullable=False),
    sa.Column("tainted", sa.Boolean, nullable=False, default=False),
    sa.Column("version", sa.Integer, nullable=False, default=1),
    sa.Column("created_at", sa.Double, nullable=False),
)

disks = sa.Table(
    "disks",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("name", _NAME, nullable=False),
    sa.Column("project_id", sa.String(255), nullable=False),
    sa.Column("host_id", _ID, nullable=False, index=True),
    sa.Column("role", _NAME, nullable=False),
    sa.Column("lifecycle", _NAME, nullable=False),
    sa.Column("state", _NAME, nullable=False, index=True),
    # The settled state that a running one falls back to.
    sa.Column("back", _NAME, nullable=False, default=""),
    sa.Column("operation_id", _ID, index=True),
    sa.Column("reason", sa.Text, nullable=False, default=""),
    sa.Column("shareable", sa.Boolean, nullable=False, default=False),
    sa.Column("cdrom", sa.Boolean, nullable=False, default=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("image", sa.String(255)),
    # What was wanted, resolved: enough to make the disk again.
    sa.Column("spec", _JSON, nullable=False),
    sa.Column("generation_id", _ID),
    sa.Column("version", sa.Integer, nullable=False, default=1),
    sa.Column("created_at", sa.Double, nullable=False),
)

owners = sa.Table(
    "owners",
    metadata,
    sa.Column("disk_id", _ID, primary_key=True),
    sa.Column("instance_id", _ID, primary_key=True),
    # How this instance sees it.
    sa.Column("name", _NAME, nullable=False),
    sa.Column("bus", _NAME, nullable=False),
    sa.Column("device", _NAME, nullable=False),
    sa.Column("position", sa.Integer, nullable=False),
    sa.UniqueConstraint("instance_id", "name"),
    sa.UniqueConstraint("instance_id", "device"),
)

generations = sa.Table(
    "generations",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    # None: a debt, an object to be purged with no disk to it.
    sa.Column("disk_id", _ID, index=True),
    sa.Column("disk_name", _NAME, nullable=False),
    sa.Column("instance_id", _ID),
    sa.Column("project_id", sa.String(255), nullable=False),
    sa.Column("host_id", _ID, nullable=False),
    sa.Column("state", _NAME, nullable=False, index=True),
    sa.Column("operation_id", _ID, index=True),
    sa.Column("backend", sa.String(255), nullable=False),
    sa.Column("scope", sa.String(255), nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("format", _NAME, nullable=False),
    sa.Column("shareable", sa.Boolean, nullable=False, default=False),
    sa.Column("handle", _JSON, nullable=False),
    # Name of the image cache's entry that the object goes on needing.
    sa.Column("entry", sa.String(255), nullable=False, default="", index=True),
    sa.Column("image", sa.String(255)),
    sa.Column("path", _NAME, nullable=False, default=""),
    sa.Column("reason", sa.Text, nullable=False, default=""),
    sa.Column("created_at", sa.Double, nullable=False),
)

attachments = sa.Table(
    "attachments",
    metadata,
    sa.Column("generation_id", _ID, primary_key=True),
    sa.Column("host_id", _ID, primary_key=True),
    sa.Column("instance_id", _ID, primary_key=True),
    sa.Column("operation_id", _ID),
    sa.Column("readonly", sa.Boolean, nullable=False, default=False),
    sa.Column("handle", _JSON, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("generation_id", _ID, nullable=False, index=True),
    sa.Column("operation_id", _ID, index=True),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("handle", _JSON, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

operations = sa.Table(
    "operations",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("verb", _NAME, nullable=False),
    # An instance's id, or a disk's where there is no instance: one operation each.
    sa.Column("target", _ID, nullable=False),
    sa.Column("host_id", _ID, nullable=False, index=True),
    sa.Column("boot_id", _ID, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("detail", _JSON, nullable=False),
    sa.UniqueConstraint("target"),
)
