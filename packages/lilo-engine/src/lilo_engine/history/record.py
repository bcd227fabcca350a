"""Records of the history: what was done to a model, with which plan, and from where it can be done again. Values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lilo_engine.history.segments import Place
from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import ForwardBackward, OptimStep, RequestId
from lilo_engine.operations.reference import CheckpointRef

DATUM_BYTES = 1024
"""What a datum in memory costs beside its arrays: four objects, a mapping and the heads of its buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What ran together, and why."""

    number: int
    """Plans are numbered as they were carried out, from 1."""
    request_ids: tuple[RequestId, ...]
    """In the order in which the trainer got them."""
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class Payload:
    """The data of one pass, in memory or in a segment."""

    entry: Entry | None
    """What it belongs to while that has no result."""
    size_bytes: int
    """What it takes in memory."""
    operation: ForwardBackward | None
    """None while it is only in a segment."""
    place: Place | None = None
    is_needed: bool = True
    """Cleared when it was given up, also while it is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward_backward that added its gradients."""

    seq_id: int
    plan: PlanRecord
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An optimizer step that was done."""

    seq_id: int
    plan: PlanRecord
    operation: OptimStep


Done: TypeAlias = Pass | Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Where the recorded operations start from."""

    source: CheckpointRef | None
    """None = the fresh adapter."""
    with_optimizer: bool
