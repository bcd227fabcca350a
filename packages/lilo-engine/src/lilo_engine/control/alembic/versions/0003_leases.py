"""Who the engine of these records is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("process", sa.String(), nullable=False),
        sa.Column("address", sa.String()),
    )


def downgrade() -> None:
    op.drop_table("leases")
