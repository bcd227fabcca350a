"""Strikes: when a trainer that does not answer is given up, with time as an argument."""

import hypothesis.strategies as st
from hypothesis import given
from lilo_engine.commands.strikes import MAX_STRIKES, Strikes


def test_one_that_never_got_on_is_given_up_at_the_second_look():
    strikes = Strikes(limit_s=100.0, since_s=0.0)
    assert strikes.until_look_s(0.0) == 100.0
    assert not strikes.look(100.0, 100.0)
    assert strikes.until_look_s(100.0) == 25.0
    assert strikes.look(125.0, 125.0)


def test_one_that_does_not_say_is_judged_by_its_silence():
    strikes = Strikes(limit_s=4.0, since_s=0.0)
    assert not strikes.look(4.0, None)
    assert strikes.look(5.0, None)


def test_progress_between_two_looks_begins_the_count_anew():
    strikes = Strikes(limit_s=100.0, since_s=0.0)
    assert not strikes.look(100.0, 100.0)
    assert not strikes.look(125.0, 5.0)
    assert strikes.until_look_s(125.0) == 95.0
    assert not strikes.look(220.0, 100.0)
    assert strikes.look(245.0, 125.0)


def test_looks_of_a_long_limit_are_half_a_minute_apart():
    strikes = Strikes(limit_s=2400.0, since_s=0.0)
    strikes.look(2400.0, None)
    assert strikes.until_look_s(2400.0) == 30.0


@given(st.floats(0.1, 1e4), st.lists(st.floats(0.0, 0.99), min_size=1, max_size=50))
def test_one_that_gets_on_within_its_limit_is_never_given_up(limit_s, pauses):
    """Whatever the moments at which it gets on, as long as no pause between two of them is over the limit."""
    strikes, now_s, moved_s = Strikes(limit_s=limit_s, since_s=0.0), 0.0, 0.0
    for pause in pauses:
        moved_s += pause * limit_s
        now_s = max(now_s + strikes.until_look_s(now_s), moved_s)
        assert not strikes.look(now_s, now_s - moved_s) or now_s - moved_s >= limit_s


@given(st.floats(0.1, 1e4))
def test_one_that_stands_still_is_given_up_after_so_many_looks(limit_s):
    strikes, now_s, looks = Strikes(limit_s=limit_s, since_s=0.0), 0.0, 0
    given_up = False
    while not given_up:
        now_s += strikes.until_look_s(now_s) + 1e-6
        given_up, looks = strikes.look(now_s, None), looks + 1
    assert looks == MAX_STRIKES
    assert now_s <= limit_s + min(0.25 * limit_s, 30.0) + 1e-3
