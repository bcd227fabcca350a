"""Text that a database cannot keep is bad input, whatever the database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lilo_engine.control.checkpoints import Checkpoints
from lilo_engine.control.records import Records
from lilo_engine.control.session_search import SessionSearch, Wanted
from lilo_engine.control.sessions import NewSession, Sessions
from lilo_engine.errors import InvalidRequest
from lilo_engine.requests.rest import iso_time
from lilo_volume import LocalVolume, SoloGroup, begin

pytestmark = pytest.mark.anyio
NUL = "a\x00b"


SHAPE = {
    "alpha": "1.0",
    "train_attn": "true",
    "train_mlp": "true",
    "train_unembed": "true",
}


@pytest.fixture(params=["sqlite", "postgresql"])
def records(request, tmp_path) -> Iterator[Records]:
    if request.param == "sqlite":
        opened = Records(f"sqlite:///{tmp_path / 'records.sqlite3'}")
        opened.migrate()
        yield opened
        opened.close()
        return
    opened = Records(request.getfixturevalue("postgres_url"))
    opened.migrate()
    yield opened
    opened.close()


async def is_kept(work) -> bool:
    """Whether it was kept; anything but a refusal in words is raised."""
    try:
        await work
    except InvalidRequest:
        return False
    return True


async def test_text_with_a_zero_in_it_is_kept_or_refused_in_words(records):
    sessions, holds_it = Sessions(records), records.engine.dialect.name == "sqlite"
    wanted = Wanted(owners=("",), project_ids=[NUL])
    assert await is_kept(sessions.create(NewSession(display_name=NUL), 1.0)) == holds_it
    assert await is_kept(sessions.owner(NUL)) == holds_it
    assert await is_kept(SessionSearch(records).find(wanted)) == holds_it
    # It lies escaped in a column of JSON.
    assert await is_kept(sessions.create(NewSession(user_metadata={NUL: NUL}), 1.0))


async def test_a_number_that_no_column_holds_is_refused_in_words(records):
    assert not await is_kept(Sessions(records).listed([""], 10, 10**30))


@pytest.mark.parametrize(
    ("metadata", "is_listed"),
    [
        ({"user_metadata": '{"a":' + 20_000 * "[" + 20_000 * "]" + "}"}, True),
        ({"user_metadata": '{"a": "\\ud800"}'}, True),
        ({"user_metadata": '{"a": "\\u0000"}'}, True),
        ({"ttl_s": "\u00b2"}, True),
        ({"ttl_s": 5000 * "9"}, True),
        ({"ttl_s": 12 * "9"}, True),
        ({**SHAPE, "lora_rank": 30 * "9"}, True),
        ({**SHAPE, "lora_rank": "8", "seed": 30 * "9"}, True),
        ({**SHAPE, "lora_rank": "8", "alpha": "nan"}, True),
        ({"note": NUL + "\ud800"}, True),
        ({"owner": NUL}, False),
        ({"owner": "\ud800"}, False),
        ({"base_model": "\ud800"}, False),
    ],
)
async def test_a_manifest_with_odd_text_keeps_no_server_from_starting(
    records, tmp_path, metadata, is_listed
):
    volume = LocalVolume(tmp_path)
    for name, said in (("odd", metadata), ("good", {})):
        with begin(
            volume,
            SoloGroup(),
            collection="s:train:0",
            kind="weights",
            name=name,
            order=1,
            timeout_s=10,
        ) as attempt:
            with attempt.create("state") as file:
                file.write(b"x")
            attempt.publish(expected=["state"], metadata=said)
    checkpoints = Checkpoints(records, volume)
    checkpoints.take_over()
    entries, _ = await checkpoints.listed([""], 10, 0)
    assert {entry.ref.name for entry in entries} == {"good", *(["odd"] if is_listed else [])}
    for entry in entries:
        assert iso_time(entry.created_s)
        iso_time(entry.expires_s)
