"""Definition: one trainable deployment: a base model, its adapters, the layout it runs in, and its limits.

Pure data: nothing here loads a model. Every field reaches the part that honours it, or building that part fails. The
pieces are in `model`, `lora`, `topology`, `trainer`, `limits`, `sampler` and `deployment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self, TypeAlias, cast

from pydantic import Field, model_validator

from lilo_definitions.deployment import Deployment
from lilo_definitions.limits import Limits
from lilo_definitions.lora import Lora
from lilo_definitions.model import ModelSpec
from lilo_definitions.part import Part, misfit
from lilo_definitions.sampler import Sampler
from lilo_definitions.topology import Topology
from lilo_definitions.trainer import Trainer

_Fields: TypeAlias = Mapping[str, object]


class Definition(Part):
    """One trainable deployment."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """What `lilo serve` is given; also part of file and resource names, hence few characters."""
    summary: str = Field(min_length=1)
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
    trainer: Trainer = Trainer()
    """How the ranks compute."""
    limits: Limits
    """Bounds of work and waiting."""
    sampler: Sampler = Sampler()
    """What answers `sample`."""
    deployment: Deployment = Deployment()
    """What is rented for it."""

    def derive(self, **changes: object) -> Self:
        """A definition like this one with some fields changed, checked as a new one is.

        Args:
            changes: field -> new value. For a part, a mapping changes only the fields it names, at any depth:
                `tiny().derive(name="tiny-wide", lora={"slots": 64})`; a part takes the place of the whole.

        Raises:
            ValidationError: the result does not hold (pydantic's error, a `ValueError`).
        """
        plain = {
            field: value.model_dump() if isinstance(value, Part) else value
            for field, value in changes.items()
        }
        return type(self).model_validate(merged(self.model_dump(), plain))

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check fields against each other; messages carry the numbers."""
        if self.context > self.model.context:
            raise misfit(
                "context",
                f"context {self.context} is over the {self.model.context} tokens that {self.model.name!r} "
                "can take; lower it",
            )
        longest_shard = -(-self.context // self.topology.cp)
        if longest_shard > self.limits.max_tokens_per_rank:
            raise misfit(
                "limits.max_tokens_per_rank",
                f"a row of {self.context} tokens gives each of {self.topology.cp} context-parallel ranks "
                f"{longest_shard}, over max_tokens_per_rank {self.limits.max_tokens_per_rank}; "
                "raise the limit or cp, or lower the context",
            )
        return self


def merged(content: _Fields, changes: _Fields) -> dict[str, object]:
    """`content` with `changes` laid over it: mappings field by field at any depth, everything else replaced."""
    result = dict(content)
    for field, value in changes.items():
        part = result.get(field)
        if isinstance(part, Mapping) and isinstance(value, Mapping):
            result[field] = merged(cast(_Fields, part), cast(_Fields, value))
        else:
            result[field] = value
    return result
