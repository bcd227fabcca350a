"""The database is an index: its schema is what the migrations make, and deleting it loses no checkpoint."""

from __future__ import annotations

import stat

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from lilo_engine.control.records import Records
from lilo_engine.control.tables import Base
from lilo_engine.errors import NotFound, ServerError, Unavailable
from lilo_engine.operations.reference import CheckpointRef
from lilo_volume import LocalVolume, SoloGroup, begin

pytestmark = pytest.mark.anyio


def test_migrations_make_exactly_the_tables_of_the_code(tmp_path):
    records = Records.at(tmp_path)
    with records.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        journal = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
    assert journal == "wal"
    records.migrate()
    records.close()


def test_only_the_owner_can_read_the_records(tmp_path):
    records = Records.at(tmp_path)
    records.close()
    assert stat.S_IMODE((tmp_path / "records.sqlite3").stat().st_mode) == 0o600


@pytest.mark.filterwarnings("error")
def test_a_data_folder_may_have_any_name(tmp_path):
    for name in ("a?mode=ro", "a%20b#c"):
        folder = tmp_path / name
        folder.mkdir()
        for opened in (Records.at(folder), Records.of_engine(folder)):
            opened.close()
        assert (folder / "records.sqlite3").stat().st_size > 0
    assert len(list(tmp_path.iterdir())) == 2


async def test_deleting_the_database_loses_no_checkpoint(plane):
    model_id = await plane.run("s")
    await plane.save(model_id, "first", ttl_s=3600)
    await plane.save(model_id, "second")
    before, _ = await plane.control.checkpoints.listed([""], 10, 0)
    plane.control.records.close()
    for file in plane.data.root.glob("records.sqlite3*"):
        file.unlink()
    control = plane.reopened()
    after, total = await control.checkpoints.listed([""], 10, 0)
    assert total == 2
    assert {e.ref for e in after} == {e.ref for e in before}
    assert {e.ref.name: e.expires_s is None for e in after} == {"first": False, "second": True}
    assert all(e.spec["lora_rank"] == "4" and e.user_metadata == {"note": "kept"} for e in after)
    run = await control.runs.get(model_id)
    assert (run.base_model, run.lora_rank, run.train_mlp, run.seed) == ("tiny", 4, False, 7)


async def test_a_checkpoint_that_describes_no_adapter_is_listed_and_keeps_nobody_from_starting(
    plane,
):
    with begin(
        LocalVolume(plane.data.checkpoints),
        SoloGroup(),
        collection="s:train:0",
        kind="weights",
        name="odd",
        order=1,
        timeout_s=10,
    ) as attempt:
        with attempt.create("state") as file:
            file.write(b"x")
        attempt.publish(expected=["state"], metadata={"lora_rank": "many"})
    control = plane.reopened()
    entries, _ = await control.checkpoints.listed([""], 10, 0)
    assert [entry.ref.name for entry in entries] == ["odd"]
    assert (await control.runs.get("s:train:0")).lora_rank == 0


async def test_a_row_without_a_manifest_does_not_outlive_a_restart(plane):
    model_id = await plane.run("s")
    save = await plane.save(model_id, "lost")
    ref = CheckpointRef(run_id=model_id, kind="weights", name=save.name)
    entry = await plane.control.checkpoints.get(ref)
    for file in sorted(plane.data.checkpoints.rglob("manifest.json")):
        file.unlink()
    assert entry.size_bytes == 4
    with pytest.raises(NotFound):
        await plane.reopened().checkpoints.get(ref)


async def test_a_lifetime_changed_after_publishing_survives_a_restart(plane):
    model_id = await plane.run("s")
    await plane.save(model_id, "x", ttl_s=3600)
    ref = CheckpointRef(run_id=model_id, kind="weights", name="x")
    await plane.control.checkpoints.set_lifetime(ref, None)
    assert (await plane.reopened().checkpoints.get(ref)).expires_s is None


@pytest.mark.parametrize("stated", [None, 7200], ids=["no lifetime at first", "with one"])
@pytest.mark.parametrize("changed", [None, 12345.0], ids=["for ever", "until"])
async def test_a_lifetime_changed_after_publishing_survives_the_loss_of_the_records(
    plane, stated, changed
):
    model_id = await plane.run("s")
    await plane.save(model_id, "x", ttl_s=stated)
    ref = CheckpointRef(run_id=model_id, kind="weights", name="x")
    await plane.control.checkpoints.set_lifetime(ref, 99.0)
    await plane.control.checkpoints.set_lifetime(ref, changed)
    await plane.save(model_id, "y", ttl_s=stated)
    plane.control.records.close()
    for file in plane.data.root.glob("records.sqlite3*"):
        file.unlink()
    found = plane.reopened().checkpoints
    assert (await found.get(ref)).expires_s == changed
    other = await found.get(CheckpointRef(run_id=model_id, kind="weights", name="y"))
    assert (other.expires_s is None) == (stated is None), "no other has it"


async def test_overwriting_replaces_the_entry_and_its_notes(plane):
    model_id = await plane.run("s")
    ref = CheckpointRef(run_id=model_id, kind="weights", name="x")
    await plane.save(model_id, "x", user_metadata={"note": "old"})
    old = await plane.control.checkpoints.get(ref)
    await plane.save(model_id, "x", user_metadata={"note": "new"})
    new = await plane.control.checkpoints.get(ref)
    assert (old.user_metadata["note"], new.user_metadata["note"]) == ("old", "new")
    assert old.attempt != new.attempt


async def test_deleting_removes_the_files_and_a_second_time_says_so(plane):
    model_id = await plane.run("s")
    await plane.save(model_id, "x")
    ref = CheckpointRef(run_id=model_id, kind="weights", name="x")
    await plane.control.delete_checkpoint(ref, missing_ok=False)
    assert not list(plane.data.checkpoints.rglob("manifest.json"))
    with pytest.raises(NotFound):
        await plane.control.delete_checkpoint(ref, missing_ok=False)


async def test_a_run_of_an_earlier_server_says_that_it_ended_and_how_to_go_on(plane):
    model_id = await plane.run("s")
    control = plane.reopened()
    assert (await control.runs.get(model_id)).ended_s is not None
    assert (await control.runs.why_gone(model_id)).kind == "gone"
    assert await control.runs.why_gone("nobody:train:0") is None


def test_a_file_that_is_no_database_is_named_and_kept(tmp_path):
    (tmp_path / "records.sqlite3").write_text("something else entirely\n" * 100)
    with pytest.raises(ServerError, match=str(tmp_path / "records.sqlite3")):
        Records.at(tmp_path)
    assert (tmp_path / "records.sqlite3").read_text().startswith("something else")


def test_records_of_a_newer_version_are_refused(tmp_path):
    records = Records.at(tmp_path)
    with records.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'from-the-future'")
    records.close()
    with pytest.raises(ServerError, match="from-the-future"):
        Records.at(tmp_path)


def test_a_full_disk_is_a_reason_to_try_again(tmp_path):
    records = Records.at(tmp_path)
    records.now(lambda session: session.execute(sa.text("PRAGMA max_page_count = 1")))
    with pytest.raises(Unavailable, match="full"):
        records.now(
            lambda session: session.execute(
                sa.text("CREATE TABLE large AS SELECT zeroblob(1000000) AS zeros")
            )
        )
    records.close()
