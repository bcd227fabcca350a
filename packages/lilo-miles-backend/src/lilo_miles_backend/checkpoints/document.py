"""Document: `checkpoint.json`, what a training checkpoint is, for programs and for people who open the folder."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Literal

from lilo_engine.errors import CommandFailed
from lilo_engine.operations.operation import LoraSpec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lilo_miles_backend.adapter_state import AdapterState

DOCUMENT_NAME = "checkpoint.json"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LoraDocument(_Part):
    """The adapter's shape."""

    lora_rank: int = Field(gt=0)
    alpha: float = Field(gt=0, allow_inf_nan=False)
    seed: int | None
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


class CheckpointDocument(_Part):
    """One training checkpoint."""

    format: Literal["lilo-training-1"] = "lilo-training-1"
    """Grows when a reader of the previous format could misread a checkpoint."""
    base_model: str
    lora: LoraDocument
    optimizer_step: int = Field(ge=0)
    topology: dict[str, int]
    """Degrees by axis of the trainer that wrote it; any other may read it."""
    versions: dict[str, str]
    """Of the distributions that wrote it."""

    @property
    def spec(self) -> LoraSpec:
        """The adapter's shape, as the engine has it."""
        return LoraSpec(**self.lora.model_dump())

    @classmethod
    def of(cls, state: AdapterState, topology: dict[str, int]) -> CheckpointDocument:
        """The document of `state`."""
        spec = state.spec
        return cls(
            base_model=state.base_model,
            lora=LoraDocument(
                lora_rank=spec.lora_rank,
                alpha=spec.alpha,
                seed=spec.seed,
                train_attn=spec.train_attn,
                train_mlp=spec.train_mlp,
                train_unembed=spec.train_unembed,
            ),
            optimizer_step=state.optimizer_step,
            topology=topology,
            versions=_versions(),
        )

    @classmethod
    def parse(cls, data: bytes, label: str) -> CheckpointDocument:
        """Read the file.

        Raises:
            CommandFailed: it is not such a document, or of a newer format.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise CommandFailed(
                f"{label}: {DOCUMENT_NAME} cannot be read: {where}: {first['msg']}; a newer version may have "
                "written it"
            ) from error


@functools.cache
def _versions() -> dict[str, str]:
    """Installed versions; looked up once, it costs milliseconds."""
    return {name: metadata.version(name) for name in ("lilo-miles-backend", "lilo-volume", "torch")}
