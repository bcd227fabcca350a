"""Qwen3, dense: Llama's layer with queries and keys normalised per head."""

from __future__ import annotations

from typing import Any, Literal

from lilo_miles_backend.families.config import DecoderConfig
from lilo_miles_backend.families.shape import ModelShape


class Qwen3Config(DecoderConfig):
    """A `config.json` of this family."""

    model_type: Literal["qwen3"]


def read_qwen3(config: dict[str, Any]) -> ModelShape:
    """The shape, from a parsed `config.json`; pydantic's ValidationError where it is not built."""
    found = Qwen3Config.model_validate(config)
    return ModelShape(
        family="qwen3", layers=("softmax",) * found.num_hidden_layers, qk_norm=True, **found.sizes
    )
