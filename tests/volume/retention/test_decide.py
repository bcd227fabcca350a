"""Retention decides by numbers, never by text, and never lets the newest verified checkpoint go. Pure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lilo_volume import Candidate, Retention
from lilo_volume.retention import decide

NOW = 10_000_000
OLD = 1_000


def candidate(order, *, state="published", verified=None, folder=None, **rest):
    return Candidate(
        label=f"run/weights/{order}",
        folder=folder or f"run/weights/{order}/a",
        state=state,
        series=("run", "weights"),
        since_unix_ms=rest.pop("since_unix_ms", OLD),
        verified=state in ("published", "replaced") if verified is None else verified,
        why="",
        size_bytes=1,
        order=(order, OLD),
        **rest,
    )


def kept(candidates, **policy):
    policy = {"reader_guard_s": 0, "attempt_guard_s": 0} | policy
    decisions = decide(candidates, Retention(**policy), now_unix_ms=NOW)
    return sorted(d.candidate.order[0] for d in decisions if d.verdict != "remove")


def steps(*orders):
    return [candidate(order) for order in orders]


def test_the_last_are_counted_as_numbers_not_as_text():
    assert kept(steps(9000, 9500, 10000, 10500), keep_last=2) == [10000, 10500]
    assert kept(steps(9000, 10000), keep_last=1) == [10000]


def test_with_no_rule_every_checkpoint_stays():
    assert kept(steps(1, 2, 3)) == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_every": 0},
        {"keep_best": 0, "metric": "loss"},
        {"keep_best": 1},
        {"metric": "loss"},
        {"reader_guard_s": -1.0},
        {"attempt_guard_s": float("nan")},
    ],
)
def test_a_policy_that_keeps_nothing_or_means_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).partition("_")[0]):
        Retention(**wrong)


def test_every_so_many_stay_beside_the_last():
    assert kept(steps(*range(10)), keep_last=2, keep_every=4) == [0, 4, 8, 9]


def test_the_best_stay_whatever_their_age():
    losses = {1: "0.5", 2: "0.1", 3: "nan", 4: "0.3", 5: "", 6: "0.4"}
    items = [candidate(order, metadata={"loss": text}) for order, text in losses.items()]
    assert kept(items, keep_best=2, metric="loss") == [2, 4, 6]
    assert kept(items, keep_best=1, metric="loss", best="max") == [1, 6]
    assert kept([candidate(7), *items], keep_best=1, metric="loss") == [2, 7]


def test_pinned_exempt_and_leased_ones_stay():
    items = [
        candidate(1, pinned=True),
        candidate(2, leased_until_unix_ms=NOW + 1),
        candidate(3, leased_until_unix_ms=NOW),
        candidate(4),
    ]
    assert kept(items, keep_last=1) == [1, 2, 4]


def test_only_verified_ones_count():
    items = [*steps(1, 2), candidate(3, state="broken"), candidate(4, state="unpublished")]
    assert kept(items, keep_last=1) == [2, 3]
    assert kept(items, keep_last=1, remove_broken=True) == [2]


def test_an_attempt_that_may_still_run_stays_and_an_old_one_goes():
    young = candidate(2, state="unpublished", since_unix_ms=NOW - 999)
    old = candidate(3, state="unpublished", since_unix_ms=NOW - 1000)
    assert kept([young, old], attempt_guard_s=1.0) == [2]


def test_what_has_no_known_age_is_watched_first():
    (decision,) = decide(
        [candidate(1, state="unpublished", since_unix_ms=None)], Retention(), now_unix_ms=NOW
    )
    assert decision.verdict == "watch"


def test_a_reader_without_a_lease_has_the_guard():
    items = [candidate(1, since_unix_ms=NOW - 999), *steps(2, 3)]
    assert kept(items, keep_last=1, reader_guard_s=1.0) == [1, 3]


def test_foreign_folders_stay_whatever_the_policy():
    items = [candidate(1, state="foreign"), *steps(2)]
    assert kept(items, keep_last=1, remove_broken=True) == [1, 2]


def test_what_was_overwritten_goes_unless_nothing_newer_is_good():
    items = [candidate(1, state="replaced"), candidate(2)]
    assert kept(items) == [2]
    assert kept([candidate(1, state="replaced"), candidate(2, state="broken")]) == [1, 2]


def test_the_end_of_its_life_removes_even_the_newest_but_no_pinned_one():
    items = [candidate(1), candidate(2), candidate(3, expires_unix_ms=NOW)]
    assert kept(items) == [1, 2]
    assert kept(items, keep_last=1) == [2]  # what is ending keeps nobody else from being the newest
    assert kept([candidate(1, expires_unix_ms=1, pinned=True)]) == [1]
    assert kept([candidate(1, expires_unix_ms=NOW + 1)]) == [1]


STATES = st.sampled_from(["published", "replaced", "broken", "unpublished", "foreign"])
CANDIDATES = st.lists(
    st.builds(
        lambda order, state, since, pinned, leased: candidate(
            order, state=state, since_unix_ms=since, pinned=pinned, leased_until_unix_ms=leased
        ),
        st.integers(0, 20),
        STATES,
        st.none() | st.integers(0, NOW + 10),
        st.booleans(),
        st.sampled_from([0, NOW + 1]),
    ),
    max_size=12,
).map(lambda items: [replace(item, folder=f"f{i}") for i, item in enumerate(items)])
POLICIES = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 3),
    keep_every=st.none() | st.integers(1, 5),
    reader_guard_s=st.sampled_from([0.0, 5.0]),
    attempt_guard_s=st.sampled_from([0.0, 5.0]),
    remove_broken=st.booleans(),
)


@given(CANDIDATES, POLICIES)
def test_no_policy_removes_the_newest_verified_a_pinned_a_leased_a_foreign_or_a_young_one(
    items, policy
):
    decisions = decide(items, policy, now_unix_ms=NOW)
    removed = [d.candidate for d in decisions if d.verdict == "remove"]
    verified = [item for item in items if item.verified]
    if verified:
        newest = max(verified, key=lambda item: item.order)
        assert any(i.order == newest.order and i not in removed for i in verified)
    for item in removed:
        assert item.state != "foreign"
        assert item.leased_until_unix_ms <= NOW
        assert not (item.pinned and item.state == "published")
        assert item.since_unix_ms is not None
        if item.state == "unpublished":
            assert NOW - item.since_unix_ms >= policy.attempt_guard_s * 1000
    assert decisions == decide(items, policy, now_unix_ms=NOW)
