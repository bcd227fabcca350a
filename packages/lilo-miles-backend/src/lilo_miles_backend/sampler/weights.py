"""BaseWeights: a dense Qwen3 model as the sampler multiplies with it: fused projections, read from safetensors.

Not the trainer's weights: the sampler is a process of its own and reads the same published folder. What the folder
asks for and this code does not do (another architecture, scaled RoPE, a sliding window) is refused here, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Projections that read the same input are one matrix; the parts are stacked over the output dim in this order."""

HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model, from `config.json`."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab_size: int
    rms_eps: float
    rope_theta: float

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every module that may carry an adapter, by its name inside a layer, and `lm_head`."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            HEAD: (self.vocab_size, self.hidden),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    fused: Mapping[str, torch.Tensor]
    """By the names of `FUSED`, each [out, in]."""
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """Everything that is frozen."""

    shape: Shape
    embedding: torch.Tensor
    """[vocab, hidden]."""
    head: torch.Tensor
    """[vocab, hidden]; the embedding itself when they are tied."""
    norm: torch.Tensor
    layers: tuple[Layer, ...]
    eos_tokens: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.dtype


def read_base(folder: Path, *, dtype: torch.dtype, device: torch.device) -> BaseWeights:
    """Read `config.json` and all safetensors of a Hugging Face folder.

    Raises:
        ValueError: the folder holds another kind of model, or a tensor is missing.
    """
    config = json.loads((folder / "config.json").read_text())
    _check_supported(folder, config)
    shape = _shape(config)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)

    def take(name: str) -> torch.Tensor:
        if name not in tensors:
            raise ValueError(f"{folder} has no tensor {name!r}; it holds {len(tensors)} others")
        return tensors[name].to(device=device, dtype=dtype)

    def layer(prefix: str) -> Layer:
        return Layer(
            fused={
                fused: torch.cat([take(f"{prefix}.{part}.weight") for part in parts])
                for fused, parts in FUSED.items()
            },
            input_norm=take(f"{prefix}.input_layernorm.weight"),
            post_norm=take(f"{prefix}.post_attention_layernorm.weight"),
            q_norm=take(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=take(f"{prefix}.self_attn.k_norm.weight"),
        )

    embedding = take("model.embed_tokens.weight")
    tied = config.get("tie_word_embeddings", False) or "lm_head.weight" not in tensors
    return BaseWeights(
        shape=shape,
        embedding=embedding,
        head=embedding if tied else take("lm_head.weight"),
        norm=take("model.norm.weight"),
        layers=tuple(layer(f"model.layers.{i}") for i in range(shape.num_layers)),
        eos_tokens=_eos_tokens(folder, config),
    )


def _check_supported(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse what the forward pass would silently get wrong."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    found = {
        "model_type": (config.get("model_type"), "qwen3"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "attention_bias": (config.get("attention_bias", False), False),
    }
    for key, (value, expected) in found.items():
        if value != expected:
            raise ValueError(
                f"{folder}/config.json has {key} = {value!r}; the embedded sampler runs {expected!r} only"
            )


def _shape(config: Mapping[str, Any]) -> Shape:
    heads = config["num_attention_heads"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return Shape(
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rms_eps=config["rms_norm_eps"],
        rope_theta=float(theta),
    )


def _eos_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The generation config wins over the model's, as in transformers."""
    generation = folder / "generation_config.json"
    declared = json.loads(generation.read_text()) if generation.is_file() else {}
    eos = declared.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
