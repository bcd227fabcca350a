"""Commands from the driver to every rank, and what a rank says of itself. Frozen values, no behaviour.

They say everything that ranks must agree on (seeds and capture ids are drawn by the driver), so that all ranks do
the same without asking each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from lilo_engine.commands.backend import CaptureKind
from lilo_engine.commands.command import Batch, CaptureId, Destination
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.reference import CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateAdapter:
    """Make a fresh adapter in a free slot."""

    model_id: ModelId
    spec: LoraSpec
    """As the client asked."""
    drawn_seed: int
    """Used when the spec has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch:
    """Run the items one after another."""

    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptimizer:
    """One AdamW step with the gradients of this window."""

    model_id: ModelId
    params: AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Freeze the model's state under an id."""

    model_id: ModelId
    kind: CaptureKind
    capture_id: CaptureId


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Replace the adapter by a training checkpoint that was fetched before."""

    model_id: ModelId
    source: CheckpointRef
    with_optimizer: bool
    fetch_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGradients:
    """Forget the gradients of this window."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """Free the slot."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Publish a capture and free it; runs beside the commands above."""

    capture_id: CaptureId
    destination: Destination


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Read a published training checkpoint into the memory of the ranks, checked; runs as `Persist` does."""

    fetch_id: str
    """By which `Load` asks for it."""
    source: CheckpointRef
    with_optimizer: bool
    forget: tuple[str, ...] = ()
    """Earlier ones that nobody loads any more."""


PersistCommand: TypeAlias = Persist | Fetch
"""What runs beside the train commands, in the same order on all ranks."""

TrainCommand: TypeAlias = (
    CreateAdapter | RunBatch | StepOptimizer | Capture | Load | DropGradients | Unload
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank found when it had started."""

    rank: int
    pid: int
    device: str
    losses: tuple[str, ...]
    node: str = "local"
    """Identity of its machine, as `RankPlace` has it."""
    group_limits_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Time limit of each of its process groups, by the group's name, read back from the group."""
    attention: str = ""
    """The kernels that attend, as the check at start left them; empty where no layer does."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What must be equal on all ranks: versions, volume, settings. Filled in by the process that holds the rank."""
