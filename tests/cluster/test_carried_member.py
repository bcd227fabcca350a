"""Members that carry commands in threads: what carries them is closed when no call that they were sent is under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from lilo_engine.errors import BackendLost
from lilo_miles_backend.launchers import driver
from lilo_miles_backend.launchers.carried_member import CarriedMember, places_of
from lilo_miles_backend.launchers.driver import DrivenRanks
from lilo_miles_backend.launchers.limits import DriverLimits
from lilo_miles_backend.launchers.mailboxes import Mailbox
from lilo_miles_backend.launchers.member import LinkLost

from tests.cluster.conftest import act, world_of_two

LIMIT_S = 10.0


class Held(CarriedMember):
    """Its calls come back when they are let go of, as those of a rank that hangs."""

    def __init__(self) -> None:
        super().__init__(0, "here", places_of(0, 2))
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.carry()

    @property
    def pid(self) -> int | None:
        return None

    def kill(self) -> None:
        self.end("was killed")

    def exchange(self, mailbox: Mailbox, place: int, frame: bytes) -> bytes:
        self.begun.set()
        assert self.let_go.wait(LIMIT_S)
        raise LinkLost


@pytest.fixture
def member() -> Iterator[Held]:
    held = Held()
    yield held
    held.let_go.set()
    held.kill()
    assert held.wait_ended(LIMIT_S)


def test_an_end_is_not_known_while_a_call_is_under_way(member: Held) -> None:
    answer = member.post("train", b"")
    assert member.begun.wait(LIMIT_S)
    member.kill()
    assert member.fate() == "was killed"
    assert not member.wait_ended(0.05)
    member.let_go.set()
    assert member.wait_ended(LIMIT_S)
    assert isinstance(answer.exception(0), LinkLost)


def test_a_member_that_was_asked_nothing_has_ended_at_once(member: Held) -> None:
    assert not member.wait_ended(0.0)
    member.kill()
    assert member.wait_ended(LIMIT_S)


def test_a_group_whose_calls_hang_is_told_of_and_closed_when_they_have_come_back(
    member: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "END_LIMIT_S", 0.05)
    given_back = threading.Event()
    limits = world_of_two(limit_s=0.1).limits
    ranks = DrivenRanks(
        world_of_two(),
        [member],
        DriverLimits(limits=limits, silence_s=LIMIT_S),
        facts={},
        give_back=given_back.set,
    )
    with pytest.raises(BackendLost, match=r"0\.1 s"):
        ranks.train(act("sum"))
    assert "0.1 s" in ranks.wait_lost()
    assert not given_back.is_set()
    member.let_go.set()
    assert given_back.wait(LIMIT_S)
