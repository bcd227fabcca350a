"""Llama: RMSNorm, grouped-query attention, SwiGLU. SmolLM2 is one."""

from __future__ import annotations

from typing import Any, Literal

from lilo_miles_backend.families.config import DecoderConfig
from lilo_miles_backend.families.shape import ModelShape


class LlamaConfig(DecoderConfig):
    """A `config.json` of this family."""

    model_type: Literal["llama"]
    rope_interleaved: Literal[False] = False
    """Pairs of neighbouring features, which files of the original release have, are not built."""


def read_llama(config: dict[str, Any]) -> ModelShape:
    """The shape, from a parsed `config.json`; pydantic's ValidationError where it is not built."""
    found = LlamaConfig.model_validate(config)
    return ModelShape(
        family="llama", layers=("softmax",) * found.num_hidden_layers, qk_norm=False, **found.sizes
    )
