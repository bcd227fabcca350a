"""The same control plane over PostgreSQL."""

from __future__ import annotations

from functools import partial

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from lilo_engine.config import DataFolder
from lilo_engine.control.sessions import NewSession
from lilo_engine.control.tables import Base
from lilo_engine.errors import ServerError, Unavailable
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.parts import open_control

from tests.control.conftest import Clock, Plane

pytestmark = pytest.mark.anyio


@pytest.fixture
def plane(tmp_path, monkeypatch, postgres_url):
    """A control plane whose records are on the server, empty at first."""
    monkeypatch.setenv("LILO_RECORDS_URL", postgres_url)
    data, clock = DataFolder(root=tmp_path), Clock()
    data.create()
    opened = Plane(data=data, clock=clock, control=open_control(data, clock))
    yield opened
    opened.control.records.close()


def test_the_schema_is_what_the_migrations_make(plane):
    with plane.control.records.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


async def test_runs_checkpoints_and_keys_are_kept_and_no_file_is_made(plane):
    control = plane.control
    session = await control.sessions.create(NewSession(sdk_version="0.38.0"), plane.now_s)
    run = await plane.run(session)
    await plane.save(run, "one")
    key = control.keys.create("mine", plane.now_s)
    again = plane.reopened()
    assert [row.run_id for row in (await again.runs.listed([""], 10, 0)).rows] == [run]
    ref = CheckpointRef(run_id=run, kind="weights", name="one")
    assert (await again.checkpoints.get(ref)).spec["base_model"] == "tiny"
    assert [k.name for k in again.keys.listed()] == ["mine"]
    assert key.startswith("tml-")
    assert not (plane.data.root / "records.sqlite3").exists()


async def test_an_emptied_database_is_rebuilt_from_the_manifests(plane):
    session = await plane.control.sessions.create(NewSession(), plane.now_s)
    run = await plane.run(session)
    await plane.save(run, "one")
    await plane.snapshot(run, "two", None)
    with plane.control.records.engine.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    again = plane.reopened()
    assert {entry.ref.name for entry in await again.checkpoints.of_run(run)} == {"one", "two"}


async def test_pages_of_what_was_made_at_one_moment_have_each_once(plane):
    control = plane.control
    sessions = [await control.sessions.create(NewSession(), plane.now_s) for _ in range(40)]
    runs = [await plane.run(session) for session in sessions]
    for run in runs:
        await plane.save(run, "one")

    async def pages(listed):
        return [each for offset in range(0, 40, 7) for each in await listed(7, offset)]

    async def runs_of(limit, offset):
        return [row.run_id for row in (await control.runs.listed([""], limit, offset)).rows]

    async def checkpoints_of(limit, offset):
        found, _ = await control.checkpoints.listed([""], limit, offset)
        return [entry.ref.run_id for entry in found]

    assert sorted(await pages(partial(control.sessions.listed, [""]))) == sorted(sessions)
    assert sorted(await pages(runs_of)) == sorted(runs)
    assert sorted(await pages(checkpoints_of)) == sorted(runs)


def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path, monkeypatch):
    monkeypatch.setenv("LILO_RECORDS_URL", "postgresql+psycopg://lilo:secret@127.0.0.1:1/lilo")
    data = DataFolder(root=tmp_path)
    data.create()
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:1") as caught:
        open_control(data)
    assert "secret" not in str(caught.value)


def test_a_records_url_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LILO_RECORDS_URL", "records.example.org")
    data = DataFolder(root=tmp_path)
    data.create()
    with pytest.raises(ServerError, match="LILO_RECORDS_URL"):
        open_control(data)


def test_a_transaction_that_the_server_gave_up_is_a_reason_to_try_again(plane):
    records = plane.control.records
    mine = sa.text("SELECT pg_backend_pid()")
    there = sa.text("SELECT count(*) FROM pg_stat_activity, pg_sleep(0.05) WHERE pid = :pid")

    def stopped_in_the_middle(session) -> None:
        # As of a process that is stopped for long; the server waits for it 15 s.
        session.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 20"))
        pid = session.scalar(mine)
        with records.engine.connect() as other:
            while other.scalar(there, {"pid": pid}):
                other.rollback()
        session.execute(mine)

    with pytest.raises(Unavailable, match=r"idle-in-transaction.*see to the database"):
        records.now(stopped_in_the_middle)
    assert records.now(lambda session: session.scalar(mine))
