"""Residency: slots under any sequence of steps, and steps that do not exist."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.residency import Place, Residency

NAMES = [ModelId(f"m{n}") for n in range(6)]
names = st.sampled_from(NAMES)


class Slots(RuleBasedStateMachine):
    """Models that come, wait, are made, leave, and trainers that are lost."""

    def __init__(self):
        super().__init__()
        self.residency = Residency()
        self.line = []

    def at(self, *places):
        return [name for name in NAMES if self.residency.place(name) in places]

    @precondition(lambda self: not self.residency.num_taken)
    @rule(slots=st.integers(1, 3))
    def a_trainer_starts(self, slots):
        self.residency.open(slots)

    @precondition(lambda self: self.at(None))
    @rule(index=st.integers(0, 9))
    def ask(self, index):
        there = self.at(None)
        name = there[index % len(there)]
        self.residency.ask(name)
        self.line.append(name)

    @rule(name=names)
    def withdraw(self, name):
        assert self.residency.withdraw(name) == (name in self.line)
        if name in self.line:
            self.line.remove(name)

    @precondition(lambda self: self.residency.next_to_make() is not None)
    @rule(well=st.booleans())
    def make(self, well):
        first = self.residency.next_to_make()
        assert first == self.line.pop(0)
        self.residency.begin(first)
        (self.residency.made if well else self.residency.failed)(first)

    @precondition(lambda self: self.at(Place.HELD))
    @rule()
    def leave(self):
        self.residency.leave(self.at(Place.HELD)[0])

    @precondition(lambda self: self.residency.next_to_free() is not None)
    @rule()
    def free(self):
        self.residency.freed(self.residency.next_to_free())

    @precondition(lambda self: self.residency.next_to_make() is not None)
    @rule(again=st.booleans())
    def the_trainer_is_lost_in_mid_creation(self, again):
        first = self.residency.next_to_make()
        self.residency.begin(first)
        self.residency.lose([first] if again else [])
        if not again:
            self.line.remove(first)

    @invariant()
    def no_more_slots_are_taken_than_there_are(self):
        assert 0 <= self.residency.num_taken <= self.residency.slots
        assert self.residency.num_waiting == len(self.line)
        for ahead, name in enumerate(self.line):
            assert self.residency.ahead_of(name) == ahead

    @invariant()
    def a_free_slot_goes_to_the_first_in_line(self):
        free = self.residency.num_taken < self.residency.slots
        expected = self.line[0] if free and self.line else None
        assert self.residency.next_to_make() == expected
        leaving = bool(self.at(Place.LEAVING))
        assert self.residency.is_short == bool(self.line and not free and not leaving)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("step", ["made", "failed", "leave", "freed"])
def test_a_step_that_does_not_exist_raises(step):
    residency = Residency()
    with pytest.raises(AssertionError, match="cannot go from"):
        getattr(residency, step)(NAMES[0])
    residency.ask(NAMES[0])
    with pytest.raises(AssertionError, match="there is no slot"):
        residency.begin(NAMES[0])
