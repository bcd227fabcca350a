"""ThreadGroup: ranks as threads of one process, with real deadlines. For tests; it crosses no process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from lilo_volume.config import node_id
from lilo_volume.errors import RankLost, VolumeError

T = TypeVar("T")


@dataclass(slots=True)
class _Meeting:
    """What the ranks of one world have brought so far; collective number n of each rank meets in row n."""

    nodes: tuple[str, ...]
    changed: threading.Condition = field(default_factory=threading.Condition)
    rows: dict[int, dict[int, tuple[str, Any]]] = field(
        default_factory=dict[int, "dict[int, tuple[str, Any]]"]
    )
    failure: VolumeError | None = None
    """The first one; it is everybody's, in every later collective too."""
    gone: set[int] = field(default_factory=set[int])


class ThreadGroup:
    """One rank's end of a group of threads."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        """Made by `thread_groups`."""
        self._meeting = meeting
        self._rank = rank
        self._count = 0

    @property
    def rank(self) -> int:
        """This thread's index, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._meeting.nodes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each rank."""
        return self._meeting.nodes

    def all_gather(self, value: T, *, timeout_s: float, step: str) -> list[T]:
        """Every rank's value, in rank order.

        Raises:
            RankLost: a peer left, or did not come in time; every rank gets this error, now and later.
            AssertionError: a peer came to another step: the ranks took different paths.
        """
        deadline = time.monotonic() + timeout_s
        number, self._count = self._count, self._count + 1
        changed = self._meeting.changed
        with changed:
            row = self._meeting.rows.setdefault(number, {})
            if self._meeting.failure is None:
                row[self._rank] = (step, value)
                changed.notify_all()
            while len(row) < self.world_size:
                if self._meeting.failure is not None:
                    raise self._meeting.failure
                missing = set(range(self.world_size)) - row.keys()
                if lost := missing & self._meeting.gone:
                    self._fail(step, lost, "it is gone")
                elif not changed.wait(timeout=max(0.0, deadline - time.monotonic())):
                    self._fail(step, missing, f"did not come within {timeout_s:g} s")
            steps = {rank: row[rank][0] for rank in sorted(row)}
        assert len(set(steps.values())) == 1, f"the ranks took different paths: {steps}"
        return [cast("T", row[rank][1]) for rank in range(self.world_size)]

    def broadcast(self, value: T | None, *, timeout_s: float, step: str) -> T:
        """Rank 0's value on every rank."""
        return cast("T", self.all_gather(value, timeout_s=timeout_s, step=step)[0])

    def barrier(self, *, timeout_s: float, step: str) -> None:
        """Return when every rank has come."""
        self.all_gather(None, timeout_s=timeout_s, step=step)

    def close(self) -> None:
        """Leave: whoever waits for this rank, now or later, hears at once that it is gone."""
        with self._meeting.changed:
            self._meeting.gone.add(self._rank)
            self._meeting.changed.notify_all()

    def _fail(self, step: str, ranks: set[int], why: str) -> None:
        who = tuple(sorted(ranks))
        nodes = tuple(self._meeting.nodes[rank] for rank in who)
        self._meeting.failure = RankLost(step, who, nodes, why)
        self._meeting.changed.notify_all()


def thread_groups(world_size: int, *, nodes: Sequence[str] | None = None) -> list[ThreadGroup]:
    """One group per rank, in rank order; `nodes` names the node of each, this machine's if it is not given."""
    meeting = _Meeting(tuple(nodes) if nodes is not None else (node_id(),) * world_size)
    assert len(meeting.nodes) == world_size, f"{world_size} ranks have {len(meeting.nodes)} nodes"
    return [ThreadGroup(meeting, rank) for rank in range(world_size)]


def run_ranks(
    world_size: int,
    action: Callable[[ThreadGroup], T],
    *,
    nodes: Sequence[str] | None = None,
) -> list[T | BaseException]:
    """Run `action` once per rank, each in its thread; what it returned or raised, in rank order."""
    results: list[T | BaseException] = [RuntimeError("it did not run")] * world_size

    def run(group: ThreadGroup) -> None:
        try:
            results[group.rank] = action(group)
        except BaseException as error:
            results[group.rank] = error

    groups = thread_groups(world_size, nodes=nodes)
    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
