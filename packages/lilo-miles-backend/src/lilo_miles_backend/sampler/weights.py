"""BaseWeights: a model as the sampler multiplies with it: fused projections, read from safetensors.

Not the trainer's weights: the sampler is a process of its own and reads the same folder, by the same rules (`families/`).
Tensors go to the device one by one, so the host never holds the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lilo_miles_backend.families.files import open_tensors
from lilo_miles_backend.families.read import read_shape
from lilo_miles_backend.families.shape import LayerKind, ModelShape
from lilo_miles_backend.sampler.delta import DeltaMixer
from lilo_miles_backend.sampler.mixer import Mixer
from lilo_miles_backend.sampler.softmax import SoftmaxMixer

_MLP: Mapping[str, tuple[str, ...]] = {
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}

FUSED: Mapping[LayerKind, Mapping[str, tuple[str, ...]]] = {
    "softmax": {
        "in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        **_MLP,
    },
    "delta": {
        "in": (
            "linear_attn.in_proj_qkv",
            "linear_attn.in_proj_z",
            "linear_attn.in_proj_b",
            "linear_attn.in_proj_a",
        ),
        "out": ("linear_attn.out_proj",),
        **_MLP,
    },
}
"""Projections that read the same input are one matrix; the parts are stacked over the output dim in this order."""

HEAD = "lm_head"

_Take = Callable[[str], torch.Tensor]
"""A tensor of one layer by its name in it, as it lies in the files, on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. Norm weights are as they multiply."""

    fused: Mapping[str, torch.Tensor]
    """By the names of `FUSED`, each [out, in]."""
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    mixer: Mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """Everything that is frozen."""

    shape: ModelShape
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
        InvalidRequest: the folder holds another kind of model, or other tensors than its configuration says.
    """
    shape = read_shape(folder)
    with open_tensors(folder, shape) as read:

        def take(name: str) -> torch.Tensor:
            return read(name).to(device)

        def layer(index: int) -> Layer:
            prefix = f"{shape.prefix}layers.{index}."
            return _layer(shape, shape.layers[index], lambda name: take(prefix + name), dtype)

        embedding = take(f"{shape.prefix}embed_tokens.weight").to(dtype)
        return BaseWeights(
            shape=shape,
            embedding=embedding,
            head=embedding if shape.tie_word_embeddings else take(f"{HEAD}.weight").to(dtype),
            norm=_norm(shape, take(f"{shape.prefix}norm.weight"), dtype),
            layers=tuple(layer(index) for index in range(shape.num_hidden_layers)),
            eos_tokens=_eos_tokens(folder),
        )


def _layer(shape: ModelShape, kind: LayerKind, take: _Take, dtype: torch.dtype) -> Layer:
    make = _softmax if kind == "softmax" else _delta
    return Layer(
        fused={
            fused: torch.cat([take(f"{part}.weight").to(dtype) for part in parts])
            for fused, parts in FUSED[kind].items()
        },
        input_norm=_norm(shape, take("input_layernorm.weight"), dtype),
        post_norm=_norm(shape, take("post_attention_layernorm.weight"), dtype),
        mixer=make(shape, take, dtype),
    )


def _softmax(shape: ModelShape, take: _Take, dtype: torch.dtype) -> Mixer:
    def norm(name: str) -> torch.Tensor | None:
        return _norm(shape, take(f"self_attn.{name}.weight"), dtype) if shape.qk_norm else None

    return SoftmaxMixer(
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        gated=shape.output_gate,
        eps=shape.rms_norm_eps,
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        dtype=dtype,
        device=take("input_layernorm.weight").device,
    )


def _delta(shape: ModelShape, take: _Take, dtype: torch.dtype) -> Mixer:
    assert shape.delta is not None
    return DeltaMixer(
        shape=shape.delta,
        conv_KC=take("linear_attn.conv1d.weight")[:, 0].T.to(dtype).contiguous(),
        rate=-take("linear_attn.A_log").float().exp(),
        dt_bias=take("linear_attn.dt_bias").float(),
        norm=take("linear_attn.norm.weight").float(),
        eps=shape.rms_norm_eps,
    )


def _norm(shape: ModelShape, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As it multiplies: as stored in the model's type, but 1 + w, which must not be rounded to a shorter one."""
    return weight.float() + 1 if shape.norm_offset else weight.to(dtype)


def _eos_tokens(folder: Path) -> tuple[int, ...]:
    """The generation config wins over the model's, and there the text model's over the whole, as in transformers."""
    eos = None
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        declared = json.loads(path.read_text()) if path.is_file() else {}
        for part in (declared, declared.get("text_config") or {}):
            eos = part.get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
