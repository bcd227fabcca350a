"""Sessions, runs, checkpoints, sampling sessions and keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SECONDS: sa.types.TypeEngine[float] = sa.Double()


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), primary_key=True),
        sa.Column("created_s", SECONDS, nullable=False),
        sa.Column("last_seen_s", SECONDS, nullable=False),
        sa.Column("ended_s", SECONDS),
        sa.Column("end_reason", sa.String()),
        sa.Column("sdk_version", sa.String(), nullable=False),
        sa.Column("display_name", sa.String()),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(), primary_key=True),
        sa.Column("session_id", sa.String(), nullable=False, index=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("alpha", SECONDS, nullable=False),
        sa.Column("seed", sa.BigInteger()),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("source", sa.String()),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_s", SECONDS, nullable=False),
        sa.Column("last_request_s", SECONDS, nullable=False),
        sa.Column("ended_s", SECONDS),
        sa.Column("end_reason", sa.String()),
    )
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.String(), primary_key=True),
        sa.Column("kind", sa.String(), primary_key=True),
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("attempt", sa.String(), nullable=False),
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("created_s", SECONDS, nullable=False, index=True),
        sa.Column("expires_s", SECONDS, index=True),
        sa.Column("unnamed", sa.Boolean(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
    )
    op.create_table(
        "sampling_sessions",
        sa.Column("sampling_session_id", sa.String(), primary_key=True),
        sa.Column("session_id", sa.String(), nullable=False, index=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("checkpoint", sa.String()),
        sa.Column("attempt", sa.String()),
        sa.Column("moving", sa.Boolean(), nullable=False),
        sa.Column("created_s", SECONDS, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("key_id", sa.String(), primary_key=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False, unique=True),
        sa.Column("created_s", SECONDS, nullable=False),
        sa.Column("revoked_s", SECONDS),
    )


def downgrade() -> None:
    for table in ("keys", "sampling_sessions", "checkpoints", "runs", "sessions"):
        op.drop_table(table)
