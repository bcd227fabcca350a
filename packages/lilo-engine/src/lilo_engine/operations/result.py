"""Results: what a finished operation answers, one frozen dataclass per verb, and the states of a future."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_engine.errors import LiloError
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCreated:
    """The model is resident and takes operations from number 1 on."""

    model_id: ModelId
    source: CheckpointRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A forward or forward_backward pass."""

    logprobs: tuple[Tensor, ...]
    """One float32 tensor per datum, in order, of the shape of its `target_tokens`."""
    metrics: Mapping[str, float]
    """Names with exactly one colon, `name:reduction`; `loss:sum` is always there."""

    @property
    def size_bytes(self) -> int:
        """About what its protobuf body takes, without building it."""
        return sum(len(tensor.data) + 16 for tensor in self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """An optimizer step."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A published checkpoint."""

    ref: CheckpointRef
    sampling_session_id: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint was loaded into a resident model."""

    model_id: ModelId
    ref: CheckpointRef


Result: TypeAlias = ModelCreated | Passed | Stepped | Saved | Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Not finished within the time the caller wanted to wait."""

    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Finished; `result` can be fetched again."""

    result: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Finished for good with an error."""

    error: LiloError


FutureState: TypeAlias = Pending | Complete | Failed
