"""First cause: of everything that is known about a broken group, what came first; in words for a client.

When one rank fails, the others fail too, and often their errors arrive sooner: "connection closed by peer" says
nothing of the peer. So evidence is ranked by what can be the cause of what, and by time only within that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from lilo_miles_backend.launchers.mailboxes import RankFault
from lilo_miles_backend.launchers.member import Member


class Weight(IntEnum):
    """Lower causes higher, never the other way."""

    ENDED = 0
    """The process or its node is gone."""
    RAISED = 1
    """The rank's own code raised."""
    SILENT = 2
    """The rank is stopped or cut off: it tells nothing."""
    LIMIT = 3
    """A limit of the command or of a process group ran out."""
    PEER = 4
    """A collective failed since another rank did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One thing that went wrong."""

    weight: Weight
    at_s: float
    """Seconds since the epoch."""
    words: str

    @property
    def is_primary(self) -> bool:
        """Whether nothing that may still arrive can be its cause, but what happened earlier."""
        return self.weight <= Weight.RAISED


def first_cause(evidence: Sequence[Evidence]) -> str:
    """The sentence of the first cause; what else is known of other ranks is in the log."""
    assert evidence, "a group is lost for a reason"
    return min(evidence, key=lambda one: (one.weight, one.at_s)).words


def of_fault(fault: RankFault, limit_minutes: float, others: Sequence[str] = ()) -> Evidence:
    """Evidence from what a rank raised.

    Args:
        fault: What it says.
        limit_minutes: `limits.distributed_timeout_minutes`, which a timed-out collective is told with.
        others: In words, the ranks that had not answered by then.
    """
    who = f"{name_of(fault.rank, fault.pid, fault.node)} failed in {fault.command}"
    if fault.timed_out:
        waited = (
            f"a collective waited longer than limits.distributed_timeout_minutes = {limit_minutes:g} "
            f"({limit_minutes * 60:g} s)"
        )
        rest = f"; still running: {', '.join(others)}" if others else ""
        words = f"{who}: {waited}{rest} ({fault.error})"
        return Evidence(weight=Weight.LIMIT, at_s=fault.at_s, words=words)
    weight = Weight.PEER if fault.collective else Weight.RAISED
    return Evidence(weight=weight, at_s=fault.at_s, words=f"{who}: {fault.error}")


def of_end(member: Member) -> Evidence:
    """Evidence from a process that is gone."""
    fate = member.fate() or "is gone"
    words = f"{name_of(member.rank, member.pid, member.node)} {fate}"
    return Evidence(weight=Weight.ENDED, at_s=time.time(), words=words)


def of_limit(command: str, limit: str, late: Sequence[str]) -> Evidence:
    """Evidence from a command that takes too long; `late` are the ranks that it waits for, in words."""
    words = f"{command} did not end within {limit}; still running: {', '.join(late)}"
    return Evidence(weight=Weight.LIMIT, at_s=time.time(), words=words)


def name_of(rank: int, pid: int | None, node: str) -> str:
    """A rank, for people."""
    process = "" if pid is None else f"process {pid}, "
    return f"rank {rank} ({process}node {node})"
