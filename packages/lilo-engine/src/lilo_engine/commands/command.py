"""Commands and replies: what a backend is told and what it answers. Frozen values, no behaviour.

They cross a process boundary, so they hold only numbers, text, bytes, tuples and mappings of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from lilo_definitions.lora import TargetGroup

from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import LossConfig, ModelId
from lilo_engine.operations.reference import CheckpointKind
from lilo_engine.operations.tensor import Tensor

CaptureId = NewType("CaptureId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """What a backend can do; asked once when it has started."""

    base_model: str
    vocab_size: int
    max_context: int
    """Longest model input, in tokens."""
    max_rank: int
    slots: int
    """Models that can be resident at once."""
    target_groups: tuple[TargetGroup, ...]
    losses: tuple[str, ...]
    topology: str
    """In words, as `1 rank: tp 1, cp 1, dp 1`."""
    device: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One forward_backward operation inside a batch."""

    operation_id: str
    model_id: ModelId
    datums: tuple[Datum, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Operations with one loss, config and direction that run in one call."""

    loss: str
    config: LossConfig
    forward_only: bool
    items: tuple[WorkItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer to one WorkItem: its numbers, or why this item alone failed."""

    operation_id: str
    logprobs: tuple[Tensor, ...] = ()
    """float32, one per datum, of the shape of its `target_tokens`."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Names with exactly one colon; `loss:sum` is there."""
    error: str | None = None
    """Set when this item failed and others did not (a non-finite loss, say): its window is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a capture is to be published."""

    run_id: str
    kind: CheckpointKind
    name: str
    order: int
    """Decides which of a run's checkpoints is the latest: the number of the operation that saved it."""
    overwrite: bool
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kept in the manifest, so that a catalogue can be rebuilt without records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint that is visible to everybody now."""

    run_id: str
    kind: CheckpointKind
    name: str
    attempt: str
    folder: str
    """Absolute path in the engine's view of the volume; its content never changes."""
    size_bytes: int
    digest: str
    """Self digest of the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far one rank has come."""

    rank: int
    pid: int
    completed_commands: int
    running: str | None
    """The command being run, or None."""
    age_s: float
    """Seconds since the last change of any of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Progress, never "the process exists"."""

    last_completed: str | None
    completed_commands: int
    age_s: float
    ranks: tuple[RankProgress, ...]
