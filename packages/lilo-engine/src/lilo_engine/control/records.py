"""Records: the database of the control plane (`tables.py`), opened, migrated, and reached without holding up the event loop.

The same code suits SQLite (one file, WAL) and PostgreSQL; what a dialect needs of its own is here alone: limits of a
connection, and a lock while migrating. Several processes may have the same database open.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    ProgrammingError,
)
from sqlalchemy.orm import Session, sessionmaker

from lilo_engine.config import records_url
from lilo_engine.errors import InvalidRequest, ServerError, Unavailable

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


class Records:
    """The database of one server."""

    def __init__(self, url: str | sa.URL) -> None:
        """Open without touching the tables; `migrate` brings them up to date."""
        self.guard: Callable[[Session], None] | None = None
        """Called first in every transaction; may refuse it (`lease.py`)."""
        # A connection that broke while it lay idle is replaced: a database server may be started again.
        url = sa.make_url(url)
        self._is_sqlite = url.get_backend_name() == "sqlite"
        self._engine = sa.create_engine(url, pool_pre_ping=not self._is_sqlite)
        if self._is_sqlite:
            event.listen(self._engine, "connect", _sqlite_pragmas)
        elif self._engine.dialect.name == "postgresql":
            event.listen(self._engine, "connect", _postgresql_limits)
        self._sessions = sessionmaker(self._engine, expire_on_commit=False)
        # SQLite: one at a time, since it has one writer, and waiting here is cheaper than its busy timeout.
        self._limiter = anyio.CapacityLimiter(1 if self._is_sqlite else _AT_ONCE)

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
        return cls._migrated(_file(path), str(path), advice)

    @classmethod
    def of_engine(cls, data_dir: Path, url: str | None = None) -> Records:
        """The records as an engine in another process has made them, for a front; nothing is changed.

        Raises:
            ServerError: there are none, or they are of another version.
        """
        if (url := url or records_url()) is not None:
            where, place = _database(url)
        else:
            path = data_dir / SQLITE_FILE
            if not path.exists():
                raise ServerError(
                    f"there are no records {path}; start the engine first, or name its records with --records"
                )
            where, place = _file(path), str(path)
        records = cls(where)
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
    def _migrated(cls, url: str | sa.URL, place: str, advice: str) -> Records:
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
            InvalidRequest: a text or a number that this database cannot hold, a zero character in PostgreSQL, say.
            Unavailable: the database cannot be reached or written, for want of room, say, or gave the transaction up.
        """
        try:
            try:
                return self._transaction(work)
            except IntegrityError:
                # Another process wrote the same row in the same moment; now it is there to be found.
                return self._transaction(work)
        except (DataError, OverflowError) as error:
            raise InvalidRequest(
                f"a value of the request cannot be kept in the server's records: {_why(error)}"
            ) from error
        except (IntegrityError, ProgrammingError):
            # Ours: trying again would not help.
            raise
        except DBAPIError as error:
            what = "the disk of its data folder" if self._is_sqlite else "the database"
            raise Unavailable(
                f"the server's records cannot be used: {error.orig}; see to {what}, then try again"
            ) from error

    def _transaction(self, work: Callable[[Session], T]) -> T:
        with self._sessions.begin() as session:
            if self.guard is not None:
                if self._is_sqlite:
                    # What the guard saw holds until the end of the transaction: nobody else writes meanwhile.
                    session.execute(sa.text("BEGIN IMMEDIATE"))
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


def _why(error: DataError | OverflowError) -> str:
    """The cause without the statement, which has the values of others in it."""
    return str(error.orig if isinstance(error, DataError) else error).strip().splitlines()[0]


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
            "the URL of the records (LILO_RECORDS_URL) is none of a database; expected for example "
            "postgresql+psycopg://USER:PASSWORD@HOST/NAME"
        ) from error
    except (ImportError, NoSuchModuleError) as error:
        raise ServerError(
            f"the URL of the records (LILO_RECORDS_URL) needs a driver that is not installed ({error}); for PostgreSQL: "
            "pip install 'lilo-engine[postgres]' and postgresql+psycopg://..."
        ) from error
    return parsed.render_as_string(hide_password=False), parsed.render_as_string()


def _file(path: Path) -> sa.URL:
    """Of a file with any name: in a URL that is written out, `?` would end it."""
    return sa.URL.create("sqlite", database=str(path))


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
