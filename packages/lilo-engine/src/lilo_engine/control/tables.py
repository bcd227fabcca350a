"""Tables: what the records hold, one class per table. How they are reached is `records.py`'s; how they came to be, `alembic/`'s.

The tables are an index. What is published is decided by manifests on the volume, what is resident by the engine;
deleting the database loses keys and history and nothing else. They suit SQLite and PostgreSQL alike: no dialect's own
types, times as Unix seconds.
"""

from __future__ import annotations

from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """All tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, str]: sa.JSON,
        list[str]: sa.JSON,
        float: sa.Double,
    }


class SessionRow(Base):
    """A client's session."""

    __tablename__ = "sessions"

    session_id: Mapped[str] = mapped_column(primary_key=True)
    created_s: Mapped[float]
    last_seen_s: Mapped[float]
    ended_s: Mapped[float | None]
    end_reason: Mapped[str | None]
    sdk_version: Mapped[str]
    display_name: Mapped[str | None]
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, str]]
    project_id: Mapped[str | None]
    """A client's own word to group sessions by; nothing is kept apart by it."""
    owner: Mapped[str] = mapped_column(index=True, default="")
    """Whose it is (`access.py`); also of the models and sampling sessions in it."""


class RunRow(Base):
    """A model that was made resident once: a training run."""

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    lora_rank: Mapped[int]
    alpha: Mapped[float]
    seed: Mapped[int | None] = mapped_column(sa.BigInteger)
    train_attn: Mapped[bool]
    train_mlp: Mapped[bool]
    train_unembed: Mapped[bool]
    source: Mapped[str | None]
    """The `tinker://` path it was created from."""
    owner: Mapped[str] = mapped_column(index=True, default="")
    """Whose it is, with its checkpoints."""
    user_metadata: Mapped[dict[str, str]]
    created_s: Mapped[float]
    last_request_s: Mapped[float]
    ended_s: Mapped[float | None]
    end_reason: Mapped[str | None]


class CheckpointRow(Base):
    """A published checkpoint; rebuilt from manifests."""

    __tablename__ = "checkpoints"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[str]
    folder: Mapped[str]
    position: Mapped[int] = mapped_column(sa.BigInteger)
    """The publication's order: larger is later."""
    size_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    digest: Mapped[str]
    created_s: Mapped[float] = mapped_column(index=True)
    expires_s: Mapped[float | None] = mapped_column(index=True)
    unnamed: Mapped[bool]
    """Made for a sampling session; not listed, and kept only while among the newest."""
    public: Mapped[bool] = mapped_column(default=False)
    """Every key of the server may read it. Not in the manifest: without the records it is private again."""
    owner: Mapped[str] = mapped_column(index=True, default="")
    """Whose it is, as the manifest says."""
    spec: Mapped[dict[str, str]]
    """The manifest's metadata."""
    user_metadata: Mapped[dict[str, str]]


class SamplingSessionRow(Base):
    """What one sampling client samples from."""

    __tablename__ = "sampling_sessions"

    sampling_session_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    checkpoint: Mapped[str | None]
    """A `tinker://` path; NULL = the base model."""
    attempt: Mapped[str | None]
    """Which publication under that path: a later one is other content."""
    moving: Mapped[bool]
    """Follows the later inflight snapshots of its run."""
    created_s: Mapped[float]


class KeyRow(Base):
    """An API key, by its digest; limits are NULL where it has none of its own."""

    __tablename__ = "keys"

    key_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    created_s: Mapped[float]
    revoked_s: Mapped[float | None]
    owner: Mapped[str]
    """Whose things it sees: its own id, unless it was made to see those of another key."""
    operator: Mapped[bool] = mapped_column(default=False)
    """May watch all that the server does (`access.py`)."""
    rate_per_s: Mapped[float | None]
    max_body_bytes: Mapped[int | None] = mapped_column(sa.BigInteger)
    max_waiting_bytes: Mapped[int | None] = mapped_column(sa.BigInteger)


class UsageRow(Base):
    """What an owner used on one day (UTC)."""

    __tablename__ = "usage"

    owner: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[str] = mapped_column(primary_key=True)
    """As `2026-11-30`."""
    trained_tokens: Mapped[int] = mapped_column(sa.BigInteger)
    """Of passes, forward only ones too."""
    prompt_tokens: Mapped[int] = mapped_column(sa.BigInteger)
    sampled_tokens: Mapped[int] = mapped_column(sa.BigInteger)
    device_s: Mapped[float]
    """Of the trainer: seconds of its commands times its devices; of shared ones the share of its tokens."""


class SecretRow(Base):
    """What servers over one database sign with; losing it only ends links that were handed out."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class LeaseRow(Base):
    """Which engine these records belong to (`lease.py`)."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[int] = mapped_column(sa.BigInteger)
    """One higher with each engine that takes the lease."""
    beat: Mapped[int] = mapped_column(sa.BigInteger)
    """One higher with each renewal."""
    held: Mapped[bool]
    """False once the engine gave it back."""
    holder: Mapped[str]
    """The engine, in words."""
    process: Mapped[str]
    """Its process, as `place pid start`; the machine it is on can tell by that whether it is alive."""
    address: Mapped[str | None]
    """Where fronts reach it; NULL: its own process answers clients, and no front can."""
