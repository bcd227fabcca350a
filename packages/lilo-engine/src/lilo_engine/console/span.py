"""Span: one command on a lane, while it runs and afterwards. A value; `recorder.py` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_engine.operations.operation import ModelId, RequestId
from lilo_engine.schedule.lanes import Lane

Command: TypeAlias = Literal[
    "create", "unload", "forward_backward", "forward", "optim_step", "load", "capture", "persist"
]


@dataclass(slots=True, kw_only=True, eq=False)
class Span:
    """One command on a lane."""

    lane: Lane
    command: Command
    model_ids: tuple[ModelId, ...]
    """Of its operations, in their order; one model may be there several times."""
    reason: str
    """Why it ran then, as its plan says."""
    started_s: float
    ended_s: float | None = None
    """None while it runs."""
    tokens: int = 0
    failed: int = 0
    """Operations of it that ended with an error."""
    request_ids: tuple[RequestId, ...] = ()
    """Of its operations, if they are a client's."""
