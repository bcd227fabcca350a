"""ModelShape: the sizes of a base model, read from its `config.json` and checked against what the trainer builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from lilo_engine.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class RopeParameters(BaseModel):
    """Rotary embedding; only the unscaled form is built."""

    model_config = ConfigDict(frozen=True)

    rope_theta: float
    rope_type: Literal["default"] = "default"


class ModelShape(BaseModel):
    """The fields of a Qwen3 `config.json` that decide the computation; others are ignored."""

    model_config = ConfigDict(frozen=True)

    model_type: Literal["qwen3"]
    hidden_act: Literal["silu"]
    attention_bias: Literal[False] = False
    attention_dropout: float = Field(default=0.0, ge=0, le=0)
    use_sliding_window: Literal[False] = False
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read `folder/config.json`.

        Raises:
            InvalidRequest: the file is missing, or names something the trainer does not build.
        """
        path = folder / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"cannot read the model configuration {path}: {error}") from error
        # transformers 4 wrote the rotary base as a field of its own, and "rope_scaling" for scaled forms.
        if "rope_parameters" not in config and "rope_theta" in config:
            scaling = config.get("rope_scaling") or {}
            config["rope_parameters"] = {"rope_theta": config["rope_theta"], **scaling}
        try:
            return cls.model_validate(config)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc']))} is {e['input']!r}: {e['msg']}"
                for e in error.errors()
            )
            raise InvalidRequest(
                f"{path} describes a model that is not built here: {problems}"
            ) from error
