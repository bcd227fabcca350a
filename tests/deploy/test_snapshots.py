"""Snapshots of the records, on a volume where every container has a view of its own."""

import contextlib
import sqlite3

import pytest
from lilo_engine.deploy.snapshots import FILE, KEPT, Snapshots
from lilo_volume import CheckpointMissing, LocalVolume, catalogue, open_named
from lilo_volume.testing.emulator import Emulator


def database(path, *values):
    """A database with these values, in write-ahead mode as the server has it."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS t (v)")
        connection.executemany("INSERT INTO t VALUES (?)", [(value,) for value in values])


def values(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [value for (value,) in connection.execute("SELECT v FROM t ORDER BY v")]


def test_the_next_container_finds_what_the_last_one_published(tmp_path):
    emulator = Emulator(tmp_path / "volume")
    first = emulator.mount("first")
    records = tmp_path / "records.sqlite3"
    database(records, 1)
    snapshots = Snapshots(volume=emulator.volume(first), run="r")
    # The trainer has a file open in the mount: a commit must do without a reload.
    with (first.root / "open").open("wb"):
        snapshots.take(records)
        with contextlib.closing(sqlite3.connect(records)) as writing:
            # A server that is writing: what is committed is copied, what is not is not.
            writing.execute("INSERT INTO t VALUES (2)")
            writing.commit()
            writing.execute("INSERT INTO t VALUES (3)")
            snapshots.take(records)
    first.crash()
    second = Snapshots(volume=emulator.volume(emulator.mount("second")), run="r")
    again = tmp_path / "again" / FILE
    assert second.restore(again) is not None
    assert values(again) == [1, 2]
    assert again.stat().st_mode & 0o077 == 0


def test_a_damaged_snapshot_is_passed_over(tmp_path):
    snapshots = Snapshots(volume=LocalVolume(tmp_path / "volume"), run="r")
    records = tmp_path / "records.sqlite3"
    database(records, 1)
    snapshots.take(records)
    database(records, 2)
    newest = snapshots.take(records)
    file = newest.folder / FILE
    file.write_bytes(file.read_bytes()[:-1])
    again = tmp_path / "again.sqlite3"
    snapshots.restore(again)
    assert values(again) == [1]


def test_records_that_are_there_are_newer_than_any_snapshot(tmp_path):
    snapshots = Snapshots(volume=LocalVolume(tmp_path / "volume"), run="r")
    records = tmp_path / "records.sqlite3"
    database(records, 1)
    snapshots.take(records)
    database(records, 2)
    assert snapshots.restore(records) is None
    assert values(records) == [1, 2]


def test_only_the_newest_few_stay_and_only_this_runs_go(tmp_path):
    volume = LocalVolume(tmp_path / "volume")
    records = tmp_path / "records.sqlite3"
    database(records, 1)
    other = Snapshots(volume=volume, run="other").take(records)
    mine = Snapshots(volume=volume, run="r")
    taken = [mine.take(records) for _ in range(KEPT + 2)]
    left = {c.publication.name for c in catalogue(volume, collection="r")}
    assert left == {c.publication.name for c in taken[-KEPT:]}
    assert open_named(volume, "other", "records", other.publication.name)
    with pytest.raises(CheckpointMissing):
        open_named(volume, "r", "records", taken[0].publication.name)
