"""Owners of sessions, runs and checkpoints; limits and usage of keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

SECONDS: sa.types.TypeEngine[float] = sa.Double()
OWNED = ("sessions", "runs", "checkpoints")


def upgrade() -> None:
    for table in OWNED:
        # What is there already was every key's, and stays so.
        op.add_column(table, sa.Column("owner", sa.String(), nullable=False, server_default=""))
        op.create_index(f"ix_{table}_owner", table, ["owner"])
    op.add_column("keys", sa.Column("owner", sa.String(), nullable=False, server_default=""))
    op.execute("UPDATE keys SET owner = key_id")
    no = sa.false()
    op.add_column("keys", sa.Column("operator", sa.Boolean(), nullable=False, server_default=no))
    # Whoever started the server made these.
    started = "('made at start', 'given at start')"
    op.execute(f"UPDATE keys SET operator = true WHERE name IN {started}")
    op.add_column("keys", sa.Column("rate_per_s", SECONDS))
    op.add_column("keys", sa.Column("max_body_bytes", sa.BigInteger()))
    op.add_column("keys", sa.Column("max_waiting_bytes", sa.BigInteger()))
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(), primary_key=True),
        sa.Column("day", sa.String(), primary_key=True),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("device_s", SECONDS, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("usage")
    for column in ("max_waiting_bytes", "max_body_bytes", "rate_per_s", "operator", "owner"):
        op.drop_column("keys", column)
    for table in OWNED:
        op.drop_index(f"ix_{table}_owner", table)
        op.drop_column(table, "owner")
