"""Run by alembic for every migration: on the connection that `Records.migrate` hands over."""

from __future__ import annotations

from alembic import context
from lilo_engine.control.tables import Base

connection = context.config.attributes["connection"]
# Batch mode: SQLite changes a table only by copying it.
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
