"""Contract of groups: what every `Group` must do, as functions that each rank of a fresh group of 3 or more runs.

    for check in GROUP_CONTRACT:
        run_ranks(3, check)          # or any way to give each rank its end of a group

Groups must stay open until every rank has returned. The protocol alone is used, so that the suite holds for threads,
sockets and torch alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lilo_volume.agreement import decided_by_rank_zero, done_by_every_rank
from lilo_volume.errors import GroupTimeout, MissingFiles, RankFailed, RankLost, VolumeError
from lilo_volume.group import Group
from lilo_volume.manifest import FileEntry
from lilo_volume.publication import Publication

LIMIT_S = 20.0
"""For what must succeed."""
SHORT_S = 0.3
"""For what must fail."""
SLACK_S = 5.0
"""A busy machine may be late; a wait without a limit would be later."""


def _error(action: Callable[[], object]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def values_come_in_rank_order(group: Group) -> None:
    """all_gather gives every rank's value to every rank."""
    got = group.all_gather(f"rank {group.rank}", timeout_s=LIMIT_S, step="gather")
    assert got == [f"rank {rank}" for rank in range(group.world_size)]


def rank_zero_is_heard_by_all(group: Group) -> None:
    """Broadcast gives rank 0's value, whatever others pass."""
    value = {"from": group.rank, "data": bytes(range(256))}
    got = group.broadcast(value if group.rank != 1 else None, timeout_s=LIMIT_S, step="tell")
    assert got == {"from": 0, "data": bytes(range(256))}


def what_publishing_needs_crosses_whole(group: Group) -> None:
    """Tuples, our dataclasses and our errors arrive equal to what was sent, of the same types."""
    entry = FileEntry(path="a/b", size_bytes=2**60, algorithm="sha256", digest="0" * 64)
    where = Publication(collection="c", kind="k", name="n\u00e9", order=-3, attempt="a")
    sent = ((entry, where, None), [1.5, True, "", b""], {"k": (1, 2)})
    for got in group.all_gather(sent, timeout_s=LIMIT_S, step="send"):
        assert got == sent
        assert type(got[0]) is tuple
    error = MissingFiles("c", ("x", "y"), 3)
    for back in group.all_gather(error, timeout_s=LIMIT_S, step="send an error"):
        assert type(back) is MissingFiles
        assert (back.missing, str(back)) == (error.missing, str(error))


def large_values_cross(group: Group) -> None:
    """A few megabytes of every rank, of different lengths."""
    data = bytes([group.rank]) * (2_000_000 + group.rank)
    got = group.all_gather(data, timeout_s=LIMIT_S, step="much")
    assert [len(part) for part in got] == [2_000_000 + rank for rank in range(group.world_size)]


def many_collectives_follow_each_other(group: Group) -> None:
    """Values of one collective never show in another."""
    for number in range(50):
        got = group.all_gather((number, group.rank), timeout_s=LIMIT_S, step=f"round {number}")
        assert got == [(number, rank) for rank in range(group.world_size)]
        group.barrier(timeout_s=LIMIT_S, step="barrier")


def a_rank_that_does_not_come_is_named_on_all_others(group: Group) -> None:
    """Every other rank raises within its deadline; the error has the step and the rank. Later calls raise at once."""
    if group.rank == 1:
        return
    start = time.monotonic()
    error = _error(lambda: group.barrier(timeout_s=SHORT_S, step="commit"))
    assert isinstance(error, RankLost), error
    assert isinstance(error, GroupTimeout)
    assert (error.step, error.ranks) == ("commit", (1,)), error
    assert time.monotonic() - start < SHORT_S + SLACK_S
    start = time.monotonic()
    again = _error(lambda: group.barrier(timeout_s=60.0, step="later"))
    assert isinstance(again, RankLost), again
    assert time.monotonic() - start < SLACK_S


def rank_zero_missing_is_named_on_all_others(group: Group) -> None:
    """No rank is special to those that wait: also rank 0 may be the one that does not come."""
    if group.rank == 0:
        return
    error = _error(lambda: group.barrier(timeout_s=SHORT_S, step="report"))
    assert isinstance(error, RankLost), error
    assert 0 in error.ranks, error


def an_error_of_rank_zero_is_everybodys(group: Group) -> None:
    """decided_by_rank_zero raises the same error everywhere, and the group is still good after it."""

    def decide() -> None:
        raise MissingFiles("c", ("x",), 1)

    error = _error(
        lambda: decided_by_rank_zero(
            group, decide, step="outcome", label="c", node="here", timeout_s=LIMIT_S
        )
    )
    assert isinstance(error, MissingFiles)
    assert error.missing == ("x",)
    group.barrier(timeout_s=LIMIT_S, step="after")


def an_error_of_any_rank_is_everybodys(group: Group) -> None:
    """done_by_every_rank names the rank, on every rank, and the group is still good after it."""

    def act() -> int:
        if group.rank == 2:
            raise OSError("disk full")
        return group.rank

    error = _error(
        lambda: done_by_every_rank(
            group, act, step="write", label="c", node=f"node {group.rank}", timeout_s=LIMIT_S
        )
    )
    assert isinstance(error, RankFailed)
    assert isinstance(error, VolumeError)
    assert error.rank == 2
    group.barrier(timeout_s=LIMIT_S, step="after")


GROUP_CONTRACT: tuple[Callable[[Group], None], ...] = (
    values_come_in_rank_order,
    rank_zero_is_heard_by_all,
    what_publishing_needs_crosses_whole,
    large_values_cross,
    many_collectives_follow_each_other,
    a_rank_that_does_not_come_is_named_on_all_others,
    rank_zero_missing_is_named_on_all_others,
    an_error_of_rank_zero_is_everybodys,
    an_error_of_any_rank_is_everybodys,
)
"""Every check."""
