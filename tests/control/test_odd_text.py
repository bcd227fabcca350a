"""Text that a database cannot keep is bad input, whatever the database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lilo_engine.control.records import Records
from lilo_engine.control.session_search import SessionSearch, Wanted
from lilo_engine.control.sessions import NewSession, Sessions
from lilo_engine.errors import InvalidRequest

pytestmark = pytest.mark.anyio
NUL = "a\x00b"


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
