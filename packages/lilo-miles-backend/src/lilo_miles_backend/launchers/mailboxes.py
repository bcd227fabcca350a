"""Mailboxes: the queues by which a driver reaches one rank, and what comes back out of them. Values only.

    train     every command of the GPU lane; the same order on all ranks
    persist   training states are published, and fetched to be loaded; the same order on all ranks, beside train
    publish   publication of sampler weights, which capture gathered to rank 0: only there, needs no order
    beat      how far the rank has come; answered while the others work

Every answer is a `Done`, an error of the engine that concerns this command alone, or a `RankFault`, after which the
group is lost. All of them travel as frames (`lilo_engine/commands/frames.py`), over a socket or through Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lilo_engine.commands import frames

from lilo_miles_backend import rank_commands

Mailbox: TypeAlias = Literal["train", "persist", "publish", "beat"]

ORDERED: tuple[Mailbox, ...] = ("train", "persist")
"""Those whose order must be the same on all ranks: their commands hold collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Import what a rank is made of, which takes some longer than others; nobody waits in a process group for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Join the process groups and load the base model; answered with the rank's `RankInfo`."""

    rendezvous: str
    """Where the ranks meet, as `RankPlace` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Leave the process groups; nothing comes after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Answered with the rank's `RankProgress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The command ended well."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """The command failed in a way that leaves ranks out of step."""

    rank: int
    pid: int
    node: str
    command: str
    error: str
    """Type and text."""
    trace: str
    """Of the rank, for the log."""
    collective: bool
    """Raised by a collective: most often since another rank did not come, or went away."""
    timed_out: bool
    """Raised since a time limit of a process group ran out."""
    at_s: float
    """Seconds since the epoch, on the rank's clock."""


def _register() -> None:
    frames.register(Prepare, Begin, Leave, Beat, Done, RankFault, rank_commands.RankInfo)
    frames.register(
        rank_commands.CreateAdapter,
        rank_commands.RunBatch,
        rank_commands.StepOptimizer,
        rank_commands.Capture,
        rank_commands.Load,
        rank_commands.DropGradients,
        rank_commands.Unload,
        rank_commands.Persist,
        rank_commands.Fetch,
    )


_register()
