"""Weights: Hugging Face safetensors into a Megatron model, by name, one tensor at a time.

Each Hugging Face tensor is read once and copied straight into its place: query, key and value rows into the fused
matrix that Megatron groups by key/value head, gate and up rows into one matrix. No full copy exists beside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lilo_miles_backend.qwen3.files import open_tensors
from lilo_miles_backend.qwen3.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one Hugging Face tensor goes."""

    source: str
    """Its name in the files."""
    parameter: str
    """The Megatron parameter that holds it."""
    place: Callable[[torch.Tensor], torch.Tensor]
    """From the whole parameter to the view that this tensor fills (any shape of as many elements)."""


def load_weights(model: torch.nn.Module, shape: ModelShape, folder: Path) -> None:
    """Fill every parameter of `model` from the safetensors files in `folder`.

    Raises:
        InvalidRequest: a tensor is missing, unexpected, or of another shape; the message names it.
    """
    parameters = dict(model.named_parameters())
    placements = list(_placements(shape))
    assert {p.parameter for p in placements} == set(parameters), "the weight map covers the model"
    assert {p.source for p in placements} == set(shape.tensors), "and all of the files"
    with open_tensors(folder, shape) as read:
        for placement in placements:
            target = placement.place(parameters[placement.parameter].detach())
            target.copy_(read(placement.source).view(target.shape))


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


def _rows(start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parameter: parameter[start:stop]


def _heads(shape: ModelShape, start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Heads `start` to `stop` of each key/value group of a fused matrix [G * (Q + 2) * D, hidden]."""
    groups, per_group = shape.num_key_value_heads, shape.queries_per_group + 2
    return lambda parameter: parameter.view(groups, per_group, shape.head_dim, -1)[:, start:stop]


def _placements(shape: ModelShape) -> Iterator[Placement]:
    def put(
        source: str,
        parameter: str,
        place: Callable[[torch.Tensor], torch.Tensor] = _whole,
    ) -> Placement:
        return Placement(source=f"{source}.weight", parameter=f"{parameter}.weight", place=place)

    yield put("model.embed_tokens", "embedding.word_embeddings")
    yield put("model.norm", "decoder.final_layernorm")
    if not shape.tie_word_embeddings:
        yield put("lm_head", "output_layer")
    queries, inner = shape.queries_per_group, shape.intermediate_size
    for layer in range(shape.num_hidden_layers):
        hf, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attn, fused = f"{hf}.self_attn", f"{ours}.self_attention.linear_qkv"
        yield put(f"{attn}.q_proj", fused, _heads(shape, 0, queries))
        yield put(f"{attn}.k_proj", fused, _heads(shape, queries, queries + 1))
        yield put(f"{attn}.v_proj", fused, _heads(shape, queries + 1, queries + 2))
        yield put(f"{attn}.o_proj", f"{ours}.self_attention.linear_proj")
        yield put(f"{attn}.q_norm", f"{ours}.self_attention.q_layernorm")
        yield put(f"{attn}.k_norm", f"{ours}.self_attention.k_layernorm")
        yield put(f"{hf}.input_layernorm", f"{ours}.input_layernorm")
        yield put(f"{hf}.post_attention_layernorm", f"{ours}.pre_mlp_layernorm")
        fc1 = f"{ours}.mlp.linear_fc1"
        yield put(f"{hf}.mlp.gate_proj", fc1, _rows(0, inner))
        yield put(f"{hf}.mlp.up_proj", fc1, _rows(inner, 2 * inner))
        yield put(f"{hf}.mlp.down_proj", f"{ours}.mlp.linear_fc2")
