"""API keys: kept as digests, noticed while a server runs."""

from __future__ import annotations

import hmac

import pytest
from lilo_engine.control.keys import Keys
from lilo_engine.control.records import Records
from lilo_engine.errors import InvalidRequest, NotFound

pytestmark = pytest.mark.anyio


@pytest.fixture
def records(tmp_path):
    opened = Records.at(tmp_path)
    yield opened
    opened.close()


async def test_a_key_is_accepted_and_never_kept(records, tmp_path):
    keys = Keys(records)
    key = keys.create("ann", 1.0)
    assert key.startswith("tml-")
    assert await keys.caller(key, 2.0)
    assert not await keys.caller(key + "x", 2.0)
    assert not await keys.caller("", 3.0)
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert key.encode() not in kept


async def test_a_key_made_elsewhere_is_found_when_it_is_first_used(records):
    keys, elsewhere = Keys(records), Keys(records)
    key = elsewhere.create("bob", 1.0)
    assert await keys.caller(key, 100.0)


async def test_a_key_revoked_elsewhere_ends_at_the_next_look(records):
    keys = Keys(records)
    key = keys.create("bob", 1.0)
    elsewhere = Keys(records)
    elsewhere.revoke(elsewhere.listed()[0].key_id, 2.0)
    await keys.look_again(3.0)
    assert not await keys.caller(key, 100.0)
    assert keys.listed()[0].revoked_s == 2.0


async def test_a_key_given_twice_is_one_key_and_giving_it_again_restores_it(records):
    keys = Keys(records)
    keys.create("x", 1.0, key="tml-given")
    keys.create("x", 2.0, key="tml-given")
    (only,) = keys.listed()
    keys.revoke(only.key_id, 3.0)
    assert not await keys.caller("tml-given", 4.0)
    keys.create("x", 5.0, key="tml-given")
    assert await keys.caller("tml-given", 6.0)


@pytest.mark.parametrize("key", ["", "tml-", "secret", "tml-\u00fc\u00fc\u00fc\u00fc"])
def test_a_key_that_the_sdk_would_not_send_is_refused(records, key):
    with pytest.raises(InvalidRequest):
        Keys(records).create("x", 1.0, key=key)


def test_revoking_an_unknown_key_says_so(records):
    with pytest.raises(NotFound):
        Keys(records).revoke("nobody", 1.0)


async def test_guesses_do_not_become_database_load(records):
    keys = Keys(records)
    keys.create("x", 1.0)
    assert not await keys.caller("tml-guess", 10.0)
    key = Keys(records).create("late", 10.0)
    assert not await keys.caller(key, 10.5), "looked less than a second ago"
    assert await keys.caller(key, 11.5)


async def test_a_key_is_compared_with_every_digest_in_constant_time(records, monkeypatch):
    keys = Keys(records)
    made = [keys.create(f"key {n}", float(n)) for n in range(5)]
    compared = []
    compare = hmac.compare_digest

    def counted(left, right):
        compared.append((left, right))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for key in (*made, "tml-guess"):
        compared.clear()
        await keys.caller(key, 0.0)
        assert len(compared) == 5, "also when the first one fits"
