"""Operations: what one client asked of one model, one frozen dataclass per verb, and their union.

Every operation has the number (`seq_id`, from 1) that its client gave it; operations of one model run in
the order of their numbers whatever order they arrive in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

from lilo_engine.errors import LiloError
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.reference import CheckpointRef

ModelId = NewType("ModelId", str)
"""Also the id of the training run in REST answers and paths; `ids.py` has its form."""
RequestId = NewType("RequestId", str)
"""What `retrieve_future` is asked for."""

LossConfig: TypeAlias = Mapping[str, "float | str"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The shape of one adapter."""

    lora_rank: int
    alpha: float
    """Scale of the adapter is alpha / lora_rank; the definition's, never the client's."""
    seed: int | None
    """None: drawn by the trainer, and different for each model."""
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW with decoupled weight decay; all fields come with every step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """Global norm over the model's adapter; 0 = no clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """Not numbered: it precedes number 1. `source` makes it "create from a checkpoint"."""

    model_id: ModelId
    session_id: str
    base_model: str
    lora: LoraSpec
    source: CheckpointRef | None = None
    with_optimizer: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    owner: str = ""
    """Whose model it is; its checkpoints say so in their manifests."""
    max_waiting_bytes: int | None = field(default=None, compare=False)
    """Payload that the owner's models may have unfinished together, as its key said when this one was made. Not a part of
    what was asked: another limit does not make it another request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """A pass over `datums`; adds to the model's gradients unless `forward_only`."""

    model_id: ModelId
    seq_id: int
    datums: tuple[Datum, ...]
    loss: str
    loss_config: LossConfig
    forward_only: bool
    num_tokens: int = field(init=False, compare=False, repr=False)
    """Sum of the model-input lengths."""
    num_bytes: int = field(init=False, compare=False, repr=False)
    """Size of all arrays."""

    def __post_init__(self) -> None:
        """Count: there may be thousands of datums, and where they are decoded nobody waits for the event loop."""
        object.__setattr__(self, "num_tokens", sum(datum.num_tokens for datum in self.datums))
        object.__setattr__(self, "num_bytes", sum(datum.num_bytes for datum in self.datums))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """One AdamW step with the gradients of this window."""

    model_id: ModelId
    seq_id: int
    params: AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Publish adapter and optimizer as `weights/{name}`."""

    model_id: ModelId
    seq_id: int
    name: str
    overwrite: bool
    ttl_s: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSampler:
    """Publish the adapter for sampling as `sampler_weights/{name}`, or as `external_weights/{name}`."""

    model_id: ModelId
    seq_id: int
    name: str
    """The user's name; for an ephemeral save one that the front makes from the number."""
    sampling_session_id: str | None = None
    """Set for an ephemeral save: the sampling session to open on what is published."""
    ttl_s: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    external: bool = False
    """For download, not for sampling here: published as `external_weights/{name}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Replace the model's adapter (and optimizer) by a published one."""

    model_id: ModelId
    seq_id: int
    source: CheckpointRef
    with_optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that was refused still uses up its number: it becomes a failed operation, never a gap."""

    model_id: ModelId
    seq_id: int
    verb: str
    """What it would have been: `forward_backward`, `optim_step`, ...; for people."""
    error: LiloError
    adds_gradients: bool = False
    """Whether it would have added to the gradients, so that the next step must not be done without them."""


Operation: TypeAlias = ForwardBackward | OptimStep | SaveState | SaveSampler | LoadState | Refused


def adds_gradients(operation: Operation) -> bool:
    """Whether it adds to the gradients of its window, or would have, had it not been refused."""
    if isinstance(operation, Refused):
        return operation.adds_gradients
    return isinstance(operation, ForwardBackward) and not operation.forward_only
