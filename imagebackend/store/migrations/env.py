# SPDX-License-Identifier: Apache-2.0
"""Run by Alembic: revisions go over the connection that the store hands over."""

from alembic import context

from imagebackend.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    transactional_ddl=False,
)
context.run_migrations()
