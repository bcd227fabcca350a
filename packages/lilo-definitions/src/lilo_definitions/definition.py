"""Definition: one trainable deployment: a base model, its adapters, the layout it runs in, and its limits.

Pure data: nothing here loads a model. Every field reaches the part that honours it, or building that part fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_Fields: TypeAlias = Mapping[str, object]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSpec(_Part):
    """The base model."""

    name: str
    """What clients pass as `base_model`."""
    source: str
    """A directory with `config.json` and safetensors, or `package:MODULE/FOLDER` for package data."""
    family: Literal["qwen3"]
    """Which weight map and layer structure the trainer and the sampler use."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding; token ids are below it."""
    context: int = Field(gt=0)
    """Longest model input in tokens that the model itself can take."""


class Lora(_Part):
    """The adapters that can be resident together."""

    slots: int = Field(gt=0)
    """Models that can be trained at the same time; the next `create_model` is refused."""
    max_rank: int = Field(gt=0)
    """Largest LoRA rank that a client may ask for."""
    alpha: float = Field(gt=0)
    """Scale is alpha / rank; the definition's, never the client's."""
    targets: tuple[Literal["attn", "mlp", "unembed"], ...] = ("attn", "mlp", "unembed")
    """Groups of linears that may carry an adapter."""

    @field_validator("targets")
    @classmethod
    def _some_and_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError(
                f"targets {list(value)} must name at least one of attn, mlp, unembed, each once"
            )
        return value


class Topology(_Part):
    """How many ranks, and how they split the model. World size is tp x cp x dp."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu talks over gloo, cuda over NCCL."""
    nodes: int = Field(default=1, gt=0)
    """Machines that the ranks are spread over."""
    gpus_per_node: int = Field(default=0, ge=0)
    """0 on CPU."""
    tp: int = Field(default=1, gt=0)
    """Tensor-parallel ranks: each holds a part of every weight matrix."""
    cp: int = Field(default=1, gt=0)
    """Context-parallel ranks: each holds a part of every row."""
    dp: int = Field(default=1, gt=0)
    """Data-parallel ranks: each holds different rows."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp

    @model_validator(mode="after")
    def _devices_for_all_ranks(self) -> Self:
        layout = f"tp {self.tp} x cp {self.cp} x dp {self.dp} = {self.world_size} ranks"
        if self.device == "cpu" and self.gpus_per_node:
            raise ValueError(
                f"device cpu with gpus_per_node {self.gpus_per_node}; set it to 0, or device to cuda"
            )
        num_gpus = self.nodes * self.gpus_per_node
        if self.device == "cuda" and self.world_size != num_gpus:
            raise ValueError(
                f"{layout}, but {self.nodes} nodes x {self.gpus_per_node} GPUs = {num_gpus}; "
                "one rank runs on each GPU, so the two must be equal"
            )
        if self.world_size % self.nodes:
            raise ValueError(
                f"{layout} cannot be spread evenly over {self.nodes} nodes; choose a multiple"
            )
        return self


class Limits(_Part):
    """Bounds, each with its unit in the name."""

    max_tokens_per_rank: int = Field(gt=0)
    """Padded tokens of one microbatch; bounds activation memory."""
    max_batch_tokens: int = Field(gt=0)
    """Tokens of coalesced requests in one backend call; a larger single request runs alone."""
    max_forward_backward_batch: int | None = Field(default=None, gt=0)
    """Requests in one backend call; None = no cap."""
    max_queued_operations: int = Field(default=1024, gt=0)
    """Waiting operations of one model before submissions are refused."""
    publication_workers: int = Field(default=2, gt=0)
    """Sampler publications that may run at once."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """From starting the backend until it describes itself."""
    command_timeout_s: float = Field(default=600.0, gt=0)
    """For a command of any size; see `command_s_per_token`."""
    command_s_per_token: float = Field(default=0.01, ge=0)
    """Added per token, so that the limit scales with the work."""
    distributed_timeout_minutes: float = Field(default=30.0, gt=0)
    """Time limit of every process group of the trainer."""


class Sampler(_Part):
    """The sampling engine beside the trainer."""

    engine: Literal["embedded"] = "embedded"
    """Name in the entry-point group `lilo.samplers`."""
    sequences: int = Field(default=64, gt=0)
    """Sequences generated at once; more wait."""
    max_adapters: int = Field(default=64, gt=0)
    """Adapters held in memory; the least recently used one is dropped and loaded again when asked for."""
    ephemeral_versions: int = Field(default=16, gt=0)
    """Unnamed versions kept per model; older ones are removed and then answer "gone"."""


class Definition(_Part):
    """One trainable deployment."""

    name: str
    """What `lilo serve` is given."""
    summary: str
    """One line for `lilo definitions list`."""
    model: ModelSpec
    """The frozen base."""
    context: int = Field(gt=0)
    """Longest model input in tokens that is accepted; at most the model's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen base weights and activations; adapters and optimizer are always float32."""
    lora: Lora
    """The adapters."""
    topology: Topology = Topology()
    """The ranks."""
    limits: Limits
    """Bounds of work and waiting."""
    sampler: Sampler = Sampler()
    """What answers `sample`."""

    def derive(self, **changes: object) -> Self:
        """A definition like this one with some fields changed, checked as a new one is.

        Args:
            changes: field -> new value. For a part, a mapping changes only the fields it names:
                `tiny().derive(name="tiny-wide", lora={"slots": 64})`.

        Raises:
            ValidationError: the result does not hold (pydantic's error, a `ValueError`).
        """
        content: dict[str, object] = self.model_dump()
        for field, value in changes.items():
            part = content.get(field)
            if isinstance(part, Mapping) and isinstance(value, Mapping):
                content[field] = {**cast(_Fields, part), **cast(_Fields, value)}
            else:
                content[field] = value
        return type(self).model_validate(content)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check fields against each other; messages carry the numbers."""
        if self.context > self.model.context:
            raise ValueError(
                f"context {self.context} is over the {self.model.context} tokens that {self.model.name!r} "
                "can take; lower it"
            )
        longest_shard = -(-self.context // self.topology.cp)
        if longest_shard > self.limits.max_tokens_per_rank:
            raise ValueError(
                f"a row of {self.context} tokens gives each of {self.topology.cp} context-parallel ranks "
                f"{longest_shard}, over max_tokens_per_rank {self.limits.max_tokens_per_rank}; "
                "raise the limit or cp, or lower the context"
            )
        return self
