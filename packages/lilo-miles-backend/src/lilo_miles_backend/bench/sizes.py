"""Sizes: the random models that are measured, and the rows of one step. Written to a folder, as any model's files are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from lilo_definitions import Definition, get
from transformers import Qwen3Config, Qwen3ForCausalLM

CONTEXT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One model and one step."""

    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    """Key/value heads."""
    head_dim: int
    vocabulary: int
    rows: int
    tokens: int
    """Of a row."""


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "1M": Size(
            layers=4,
            hidden=128,
            inner=384,
            heads=4,
            groups=2,
            head_dim=32,
            vocabulary=512,
            rows=8,
            tokens=128,
        ),
        "10M": Size(
            layers=6,
            hidden=384,
            inner=1024,
            heads=6,
            groups=2,
            head_dim=64,
            vocabulary=1024,
            rows=8,
            tokens=256,
        ),
        "60M": Size(
            layers=8,
            hidden=768,
            inner=2048,
            heads=12,
            groups=4,
            head_dim=64,
            vocabulary=8192,
            rows=8,
            tokens=256,
        ),
    }
)
"""By name; the names say the parameters."""


def write_model(size: Size, folder: Path) -> int:
    """Write a random tied model; returns its number of parameters."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.groups,
            head_dim=size.head_dim,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def definition_of(size: Size, folder: Path, *, pack_models: bool) -> Definition:
    """A definition of such a model with room for the adapters that are measured."""
    return get("tiny").derive(
        name=folder.name,
        context=CONTEXT,
        model={
            "name": folder.name,
            "source": str(folder),
            "vocab_size": size.vocabulary,
            "context": CONTEXT,
        },
        lora={"slots": 8, "max_rank": 32},
        limits={"max_tokens_per_rank": 2048, "max_batch_tokens": 65536},
        trainer={"pack_models": pack_models},
    )
