"""Records: the SQL tables of the control plane, and how they are reached without holding up the event loop.

The tables are an index. What is published is decided by manifests on the volume, what is resident by the engine;
deleting the database loses keys and history and nothing else. The same code suits SQLite (one file, WAL) and
PostgreSQL: no dialect's own types or statements, times as Unix seconds.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import anyio
import anyio.to_thread
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from lilo_engine.config import records_url
from lilo_engine.errors import ServerError, Unavailable

T = TypeVar("T")

_MIGRATIONS = Path(__file__).parent / "alembic"
_AT_ONCE = 4
"""Transactions of one process on a database server; its connection pool keeps five."""
_LIMIT_MS = 15_000
"""For a lock of a database server, and for a transaction whose process does not go on: one that was stopped in the
middle must not hold up its successor."""
_MIGRATION_LOCK = 0x4C494C4F
"""Any number that other programs on the same server hardly use."""


SQLITE_FILE = "records.sqlite3"
"""In the data folder."""


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


class Records:
    """The database of one server."""

    def __init__(self, url: str) -> None:
        """Open without touching the tables; `migrate` brings them up to date."""
        self.guard: Callable[[Session], None] | None = None
        """Called first in every transaction; may refuse it (`lease.py`)."""
        # A connection that broke while it lay idle is replaced: a database server may be started again.
        self._engine = sa.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
        sqlite = self._engine.dialect.name == "sqlite"
        if sqlite:
            event.listen(self._engine, "connect", _sqlite_pragmas)
        elif self._engine.dialect.name == "postgresql":
            event.listen(self._engine, "connect", _postgresql_limits)
        self._sessions = sessionmaker(self._engine, expire_on_commit=False)
        # SQLite: one at a time, since it has one writer, and waiting here is cheaper than its busy timeout.
        self._limiter = anyio.CapacityLimiter(1 if sqlite else _AT_ONCE)

    @classmethod
    def at(cls, data_dir: Path, url: str | None = None) -> Records:
        """The records of a data folder, with all migrations applied: its SQLite file, readable by its owner only.

        Where `url` or `LILO_RECORDS_URL` names a database, that one; the file is not made then.

        Raises:
            ServerError: it is no database, does not answer, or is one of a newer version.
        """
        if (url := url or records_url()) is not None:
            return cls._migrated(*_database(url), "see to the server, or unset LILO_RECORDS_URL")
        path = data_dir / SQLITE_FILE
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        advice = (
            "move them away to start with new ones, which keep every checkpoint and lose the keys"
        )
        return cls._migrated(f"sqlite:///{path}", str(path), advice)

    @classmethod
    def of_engine(cls, data_dir: Path, url: str | None = None) -> Records:
        """The records as an engine in another process has made them, for a front; nothing is changed.

        Raises:
            ServerError: there are none, or they are of another version.
        """
        if (url := url or records_url()) is not None:
            url, place = _database(url)
        else:
            path = data_dir / SQLITE_FILE
            if not path.exists():
                raise ServerError(
                    f"there are no records {path}; start the engine first, or name its records with --records"
                )
            url, place = f"sqlite:///{path}", str(path)
        records = cls(url)
        try:
            there, wanted = records.revisions()
        except DatabaseError as error:
            records.close()
            raise ServerError(f"the records {place} cannot be used: {error.orig}") from error
        if there != wanted:
            records.close()
            raise ServerError(
                f"the records {place} have version {there or 'none'}, this front needs {wanted}; start an engine of "
                "the same version first, which brings them up to date"
            )
        return records

    @classmethod
    def _migrated(cls, url: str, place: str, advice: str) -> Records:
        records = cls(url)
        try:
            records.migrate()
        except (DatabaseError, CommandError) as error:
            records.close()
            cause = error.orig if isinstance(error, DatabaseError) else error
            raise ServerError(f"the records {place} cannot be used: {cause}; {advice}") from error
        return records

    def migrate(self) -> None:
        """Apply every migration that this database has not seen."""
        config = _alembic()
        with self._engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                # Two processes that start together would both make the tables.
                connection.execute(
                    sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK}
                )
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def revisions(self) -> tuple[str | None, str | None]:
        """The newest migration that the database has seen, and the newest there is."""
        with self._engine.connect() as connection:
            there = MigrationContext.configure(connection).get_current_revision()
        return there, ScriptDirectory.from_config(_alembic()).get_current_head()

    def now(self, work: Callable[[Session], T]) -> T:
        """Run `work` in one transaction, on this thread.

        Raises:
            Unavailable: the database cannot be reached or written, for want of room, say.
        """
        try:
            try:
                return self._transaction(work)
            except IntegrityError:
                # Another process wrote the same row in the same moment; now it is there to be found.
                return self._transaction(work)
        except OperationalError as error:
            raise Unavailable(
                f"the server's records cannot be used: {error.orig}; see to the disk of its data folder, then try again"
            ) from error

    def _transaction(self, work: Callable[[Session], T]) -> T:
        with self._sessions.begin() as session:
            if self.guard is not None:
                self.guard(session)
            return work(session)

    async def run(self, work: Callable[[Session], T]) -> T:
        """Run `work` in one transaction, in a worker thread."""
        return await anyio.to_thread.run_sync(self.now, work, limiter=self._limiter)

    @property
    def engine(self) -> Engine:
        """For checks of the schema."""
        return self._engine

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    return config


def _database(url: str) -> tuple[str, str]:
    """The URL as SQLAlchemy takes it, and as a person may see it: without the password.

    Raises:
        ServerError: it is none, or its driver is not installed.
    """
    try:
        parsed = sa.make_url(url)
        parsed.get_dialect().import_dbapi()
    except ArgumentError as error:
        raise ServerError(
            "LILO_RECORDS_URL is no URL of a database; expected for example "
            "postgresql+psycopg://USER:PASSWORD@HOST/NAME"
        ) from error
    except (ImportError, NoSuchModuleError) as error:
        raise ServerError(
            f"LILO_RECORDS_URL needs a driver that is not installed ({error}); for PostgreSQL: "
            "pip install 'lilo-engine[postgres]' and postgresql+psycopg://..."
        ) from error
    return parsed.render_as_string(hide_password=False), parsed.render_as_string()


def _sqlite_pragmas(connection: sqlite3.Connection, _: object) -> None:
    """WAL: readers never wait for the writer. NORMAL: a power cut may lose the last rows, never the file."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _postgresql_limits(connection: DBAPIConnection, _: object) -> None:
    cursor = connection.cursor()
    for limit in ("lock_timeout", "idle_in_transaction_session_timeout"):
        cursor.execute(f"SET {limit} = {_LIMIT_MS}")
    cursor.close()
    connection.commit()
