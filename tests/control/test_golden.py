"""Databases as each migration left them, kept in `tests/golden/records/`: they open, and nothing in them is lost."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from lilo_engine.control import records as records_module
from lilo_engine.control.control import Control
from lilo_engine.control.records import SQLITE_FILE, Records
from lilo_engine.control.tables import Base
from lilo_engine.operations.reference import CheckpointRef
from lilo_volume import LocalVolume

from tests.golden.records.make import KEY, RUN, SESSION

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "records"
KEPT = sorted(GOLDEN.glob("revision-*.sql"))


def alembic() -> Config:
    config = Config()
    folder = Path(records_module.__file__).parent / "alembic"
    config.set_main_option("script_location", str(folder))
    return config


def test_every_migration_has_a_database_that_it_left():
    revisions = [each.revision for each in ScriptDirectory.from_config(alembic()).walk_revisions()]
    assert [f"revision-{each}" for each in sorted(revisions)] == [each.stem for each in KEPT], (
        "make the missing one: python tests/golden/records/make.py REVISION"
    )


def on_sqlite(kept: Path, folder: Path) -> str | None:
    database = sqlite3.connect(folder / SQLITE_FILE)
    database.executescript(kept.read_text("utf-8"))
    database.close()
    return None


def on_postgresql(kept: Path, url: str) -> None:
    """The same rows in the tables that the same migration makes there."""
    old = sqlite3.connect(":memory:")
    old.row_factory = sqlite3.Row
    old.executescript(kept.read_text("utf-8"))
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        config = alembic()
        config.attributes["connection"] = connection
        command.upgrade(config, kept.stem.removeprefix("revision-"))
        metadata = sa.MetaData()
        metadata.reflect(connection)
        for table in metadata.tables.values():
            if table.name != "alembic_version":
                for row in old.execute(f"SELECT * FROM {table.name}"):
                    connection.execute(_insert(table), dict(row))
    engine.dispose()
    old.close()


def _insert(table: sa.Table) -> sa.TextClause:
    """As text, casting what SQLite has no type for."""
    casts = {sa.Boolean: "boolean", sa.JSON: "json"}
    columns = list(table.columns)
    kinds = {
        c.name: next((name for kind, name in casts.items() if isinstance(c.type, kind)), None)
        for c in columns
    }
    values = ", ".join(
        f"CAST(CAST(:{name} AS text) AS {kind})" if kind else f":{name}"
        for name, kind in kinds.items()
    )
    return sa.text(f"INSERT INTO {table.name} ({', '.join(kinds)}) VALUES ({values})")


@pytest.fixture(params=["sqlite", "postgresql"])
def old_database(request, tmp_path):
    """Puts a kept database where `Records.at` finds it; its URL if it is on a server."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None

    def put(kept: Path) -> str | None:
        if url is None:
            on_sqlite(kept, tmp_path)
        else:
            on_postgresql(kept, url)
        return url

    return put


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.stem)
async def test_an_old_database_is_brought_up_to_date_with_all_that_is_in_it(
    kept, old_database, tmp_path
):
    records = Records.at(tmp_path, old_database(kept))
    with records.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    volume = tmp_path / "checkpoints"
    volume.mkdir()
    control = Control.of_front(records, LocalVolume(volume), time.time)
    session = await control.sessions.get(SESSION)
    assert (session.display_name, session.tags) == ("\u00e9t\u00e9 1", ["a", "b"])
    assert session.user_metadata == {"note": 'quotes " and \u2014'}
    await control.sessions.touch(SESSION, 1790000200.0)
    run = await control.runs.get(RUN)
    assert (run.seed, run.alpha, run.train_mlp) == (2**40, 16.0, False)
    assert await control.runs.live_of(SESSION) == [RUN]
    entry = await control.checkpoints.get(CheckpointRef(run_id=RUN, kind="weights", name="step 1"))
    assert (entry.size_bytes, entry.expires_s) == (2**33, 1890000000.0)
    assert entry.public == (kept.stem >= "revision-0002")
    sampler = await control.sampling_sessions.get(f"{SESSION}:sample:0")
    assert sampler.moving
    assert sampler.ref is not None
    assert sampler.ref.name == "inflight-00000002"
    assert [key.name for key in control.keys.listed()] == ["ann"]
    assert await control.keys.caller(KEY, time.time()) is not None
    records.close()
