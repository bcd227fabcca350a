"""ModelConfig: what a model's `config.json` says of its sizes, in Hugging Face's names; from there to an `Architecture`.

The fields that a definition is checked against and that a plan counts with; how a model computes is the trainer's
business.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lilo_definitions.architecture import Architecture, Family, LinearAttention
from lilo_definitions.errors import InvalidSource

_Count = Annotated[int, Field(gt=0)]

FAMILIES: tuple[Family, ...] = get_args(Family)
"""Model types whose sizes are understood."""


class ModelConfig(BaseModel):
    """The fields of a model's `config.json` that a definition depends on; others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str
    """Family name as transformers has it, without `_text`; equals `ModelSpec.family`."""
    vocab_size: _Count
    """Rows of the embedding."""
    hidden_size: _Count
    """Width of the residual stream."""
    num_hidden_layers: _Count
    """Decoder layers."""
    num_attention_heads: _Count
    """Query heads."""
    num_key_value_heads: _Count
    """Key and value heads; a query head shares one with others."""
    intermediate_size: _Count
    """Width inside the MLP."""
    max_position_embeddings: _Count
    """Longest sequence in tokens."""
    head_dim: int | None = Field(default=None, gt=0)
    """Features of a head; absent: hidden_size / num_attention_heads."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""
    layer_types: tuple[str, ...] | None = None
    """`full_attention` or `linear_attention` per layer."""
    full_attention_interval: int = Field(default=4, gt=0)
    """Of hybrids without `layer_types`: every so-many-th layer has softmax attention."""
    linear_num_key_heads: _Count = 16
    linear_num_value_heads: _Count = 32
    linear_key_head_dim: _Count = 128
    linear_value_head_dim: _Count = 128
    linear_conv_kernel_dim: _Count = 4

    def architecture(self) -> Architecture:
        """The sizes as the planner counts with them.

        Raises:
            InvalidSource: another family, or linear layers in no fixed interval.
        """
        if self.model_type not in FAMILIES:
            raise InvalidSource(
                f"model_type is {self.model_type!r}; the planner knows {', '.join(FAMILIES)}"
            )
        family = self.model_type
        return Architecture(
            family=family,
            layers=self.num_hidden_layers,
            hidden=self.hidden_size,
            inner=self.intermediate_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            vocab=self.vocab_size,
            context=self.max_position_embeddings,
            tied=self.tie_word_embeddings,
            linear=self._linear() if family == "qwen3_5" else None,
        )

    def _linear(self) -> LinearAttention:
        interval = self.full_attention_interval
        if self.layer_types is not None:
            num_full = self.layer_types.count("full_attention")
            interval = self.num_hidden_layers // max(num_full, 1)
            if not num_full or self.num_hidden_layers // interval != num_full:
                raise InvalidSource(
                    f"layer_types has {num_full} full_attention of {self.num_hidden_layers} layers; "
                    "expected one in a fixed interval"
                )
        return LinearAttention(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_kernel=self.linear_conv_kernel_dim,
            interval=interval,
        )


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a model folder.

    Raises:
        InvalidSource: it cannot be read, is not JSON, or lacks a field.
    """
    return read_config_file(folder / "config.json")


def read_config_file(path: Path) -> ModelConfig:
    """Read a Hugging Face `config.json`; of a model with a vision tower, its text part.

    Raises:
        InvalidSource: it cannot be read, is not JSON, or lacks a field.
    """
    try:
        return ModelConfig.model_validate(_text_part(json.loads(path.read_bytes())))
    except OSError as error:
        raise InvalidSource(
            f"{path} cannot be read: {error.strerror or error}; expected a model's config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        reason = str(error) if not isinstance(error, ValidationError) else _fields(error)
        raise InvalidSource(f"{path} is not a model configuration: {reason}") from error


def _text_part(content: object) -> object:
    if not isinstance(content, dict):
        return content
    whole = cast("dict[str, object]", content)
    text = whole.get("text_config")
    if isinstance(text, dict):
        # Of the two that may be there, transformers goes by the one of the whole model.
        tied = {key: whole[key] for key in ("tie_word_embeddings",) if key in whole}
        whole = {**cast("dict[str, object]", text), **tied}
    if isinstance(kind := whole.get("model_type"), str):
        whole = {**whole, "model_type": kind.removesuffix("_text")}
    return whole


def _fields(error: ValidationError) -> str:
    """The fields at fault, without pydantic's links."""
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
