"""Owners: whose things are whose, also after the records are lost, and for records made before there were owners."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from lilo_engine import control
from lilo_engine.control.access import (
    COMMON,
    NOBODY,
    Caller,
    KeyLimits,
    may_read,
    may_watch,
    owners_of,
    owns,
)
from lilo_engine.control.keys import Keys
from lilo_engine.control.records import Records
from lilo_engine.control.sessions import NewSession
from lilo_engine.control.view import View
from lilo_engine.errors import InvalidRequest, NotFound
from lilo_engine.operations.reference import CheckpointRef

pytestmark = pytest.mark.anyio

ANN = Caller(key_id="a", owner="ann")
BOB = Caller(key_id="b", owner="bob")
WATCHER = Caller(key_id="w", owner="watcher", operator=True)


@pytest.mark.parametrize(
    ("caller", "owner", "uses", "reads", "reads_public", "watches"),
    [
        (ANN, "ann", True, True, True, True),
        (ANN, "bob", False, False, True, False),
        (ANN, COMMON, True, True, True, True),
        (ANN, NOBODY, False, False, True, False),
        (WATCHER, "ann", False, False, True, True),
    ],
)
def test_who_may_do_what(caller, owner, uses, reads, reads_public, watches):
    assert owns(caller, owner) == uses == (owner in owners_of(caller))
    assert may_read(caller, owner, public=False) == reads
    assert may_read(caller, owner, public=True) == reads_public
    assert may_watch(caller, owner) == watches


@pytest.fixture
def records(tmp_path):
    opened = Records.at(tmp_path)
    yield opened
    opened.close()


async def test_a_key_that_replaces_another_sees_what_that_one_made(records):
    keys = Keys(records)
    first = await keys.caller(keys.create("ann", 1.0), 1.0)
    for named in (first.key_id, first.owner):
        second = await keys.caller(keys.create("ann again", 2.0, owner=named), 2.0)
        assert second.key_id != first.key_id
        assert second.owner == first.owner


@pytest.mark.parametrize("owner", ["nobody", "", "?", "a/b", "x" * 65, "\u00fc"])
def test_an_owner_that_nothing_has_is_refused_by_name(records, owner):
    with pytest.raises(InvalidRequest):
        Keys(records).create("x", 1.0, owner=owner)


async def test_a_keys_limits_and_role_are_kept_when_it_is_given_again(records):
    keys, limits = Keys(records), KeyLimits(rate_per_s=2.5, max_body_bytes=10, max_waiting_bytes=20)
    key = keys.create("x", 1.0, operator=True, limits=limits)
    keys.create("given at start", 2.0, key=key)
    again = await Keys(records).caller(key, 3.0)
    assert (again.limits, again.operator) == (limits, True)
    assert again.limits.largest_body_bytes == 10


async def test_a_key_given_to_new_records_sees_what_it_made_before_they_were_lost(plane):
    key = plane.control.keys.create("ann", plane.now_s, key="tml-given-key")
    ann = await plane.control.keys.caller(key, plane.now_s)
    plane.owner = ann.owner
    session = await plane.control.sessions.create(NewSession(owner=ann.owner), plane.now_s)
    run = await plane.run(session)
    await plane.save(run, "kept")
    plane.control.records.close()
    for file in plane.data.root.glob("records.sqlite3*"):
        file.unlink()
    opened = plane.reopened()
    again = await opened.keys.caller(opened.keys.create("ann", plane.now_s, key=key), plane.now_s)
    ref = CheckpointRef(run_id=run, kind="weights", name="kept")
    assert (await View(opened, again).checkpoint(ref)).ref == ref
    assert (await View(opened, again).run(run)).run_id == run
    with pytest.raises(NotFound):
        await View(opened, BOB).checkpoint(ref)
    # A key that was made anew can be told whose things it is to see.
    new = opened.keys.create("ann's new one", plane.now_s, owner=ann.owner)
    follower = await opened.keys.caller(new, plane.now_s)
    assert (await View(opened, follower).run(run)).run_id == run


async def test_what_was_made_before_there_were_owners_is_every_keys(plane):
    run = await plane.run("s")
    await plane.save(run, "old")
    ref = CheckpointRef(run_id=run, kind="weights", name="old")
    for caller in (ANN, BOB):
        view = View(plane.control, caller)
        assert (await view.own_checkpoint(ref)).owner == COMMON
        assert [row.run_id for row in (await view.runs(10, 0)).rows] == [run]


def test_keys_of_earlier_records_own_what_they_will_make_and_those_of_the_start_watch(tmp_path):
    path = tmp_path / "records.sqlite3"
    records = Records(f"sqlite:///{path}")
    config = Config()
    with records.engine.begin() as connection:
        config.attributes["connection"] = connection
        config.set_main_option("script_location", str(Path(control.__file__).parent / "alembic"))
        command.upgrade(config, "0003")
        for key_id, name in (("aa", "made at start"), ("bb", "bob")):
            row = {"key_id": key_id, "name": name, "digest": key_id, "created_s": 1.0}
            connection.execute(
                sa.text("INSERT INTO keys VALUES (:key_id, :name, :digest, :created_s, NULL)"), row
            )
    records.migrate()
    found = {key.key_id: key for key in Keys(records).listed()}
    assert {key_id: (key.owner, key.operator) for key_id, key in found.items()} == {
        "aa": ("aa", True),
        "bb": ("bb", False),
    }
    records.close()
