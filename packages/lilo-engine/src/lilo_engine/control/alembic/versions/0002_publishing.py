"""Published checkpoints, projects of sessions, and the secrets that sign download links."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "checkpoints",
        sa.Column("public", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.add_column("sessions", sa.Column("project_id", sa.String()))
    op.create_table(
        "secrets",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("value", sa.String(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("secrets")
    op.drop_column("sessions", "project_id")
    op.drop_column("checkpoints", "public")
