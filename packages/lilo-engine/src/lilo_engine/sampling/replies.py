"""Replies: what a front hears of samples: tickets, states and completions, wherever the manager runs.

Plain data; `manager.py` makes them, routes and `remote/` pass them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_engine.operations.result import Failed, Pending
from lilo_engine.sampling.engine import SamplerHealth
from lilo_engine.sampling.futures import Outcome, Sampled

SampleState: TypeAlias = Pending | Sampled | Failed
"""Of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTicket:
    """What a front answers to a submission."""

    request_id: str
    sequence_ids: tuple[str, ...]
    """Exactly `num_samples` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingState:
    """What the sampling side is doing, by progress."""

    phase: Literal["starting", "serving", "restarting", "stopped"]
    launches: int
    health: SamplerHealth | None
    unfinished_requests: int
    loaded_adapters: tuple[str, ...]
    last_failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Requests of one client that ended."""

    ended: Sequence[tuple[str, Outcome]]
    cursor: int
    """Where the next look starts."""
