"""Weights: Hugging Face safetensors into a Megatron model, by name, one tensor at a time.

Each Hugging Face tensor is read once and copied straight into its place: query, key and value rows into the fused
matrix that Megatron groups by key/value head, gate and up rows into one matrix. No full copy exists beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from lilo_engine.errors import InvalidRequest
from safetensors import SafetensorError, safe_open

from lilo_miles_backend.ranks.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one Hugging Face tensor goes."""

    source: str
    """Its name in the files."""
    parameter: str
    """The Megatron parameter that holds it."""
    shape: tuple[int, ...]
    """What it must have in the files."""
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
    with ExitStack() as stack:
        opened = _open(folder, stack)
        _check_names({p.source for p in placements}, set(opened), shape, folder)
        for placement in placements:
            handle = opened[placement.source]
            tensor: torch.Tensor = handle.get_tensor(placement.source)
            if tuple(tensor.shape) != placement.shape:
                raise InvalidRequest(
                    f"{folder}: {placement.source} has shape {list(tensor.shape)}; "
                    f"config.json makes it {list(placement.shape)}"
                )
            target = placement.place(parameters[placement.parameter].detach())
            target.copy_(tensor.view(target.shape))


def _open(folder: Path, stack: ExitStack) -> dict[str, safe_open]:
    """Every tensor name in the folder, with the open file that holds it."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    opened: dict[str, safe_open] = {}
    for name in files:
        try:
            handle = stack.enter_context(safe_open(folder / name, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(
                f"cannot read the model weights {folder / name}: {error}"
            ) from error
        opened.update(dict.fromkeys(handle.keys(), handle))
    return opened


def _check_names(wanted: set[str], found: set[str], shape: ModelShape, folder: Path) -> None:
    if shape.tie_word_embeddings:
        # Some writers store the tied head a second time.
        found = found - {"lm_head.weight"}
    missing, unexpected = sorted(wanted - found), sorted(found - wanted)
    if missing or unexpected:
        raise InvalidRequest(
            f"the weights in {folder} do not fit its config.json: "
            f"{len(missing)} missing (first: {missing[:3]}), {len(unexpected)} unexpected (first: {unexpected[:3]})"
        )


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


def _rows(start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parameter: parameter[start:stop]


def _heads(shape: ModelShape, start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Heads `start` to `stop` of each key/value group of a fused matrix [G * (Q + 2) * D, hidden]."""
    groups, per_group = shape.num_key_value_heads, shape.queries_per_group + 2
    return lambda parameter: parameter.view(groups, per_group, shape.head_dim, -1)[:, start:stop]


def _placements(shape: ModelShape) -> Iterator[Placement]:
    hidden, vocab = shape.hidden_size, shape.vocab_size

    def put(
        source: str,
        parameter: str,
        size: tuple[int, ...],
        place: Callable[[torch.Tensor], torch.Tensor] = _whole,
    ) -> Placement:
        return Placement(
            source=f"{source}.weight", parameter=f"{parameter}.weight", shape=size, place=place
        )

    yield put("model.embed_tokens", "embedding.word_embeddings", (vocab, hidden))
    yield put("model.norm", "decoder.final_layernorm", (hidden,))
    if not shape.tie_word_embeddings:
        yield put("lm_head", "output_layer", (vocab, hidden))
    queries, size = shape.queries_per_group, shape.head_dim
    wide, narrow = shape.num_attention_heads * size, shape.num_key_value_heads * size
    inner = shape.intermediate_size
    for layer in range(shape.num_hidden_layers):
        hf, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attn, fused = f"{hf}.self_attn", f"{ours}.self_attention.linear_qkv"
        yield put(f"{attn}.q_proj", fused, (wide, hidden), _heads(shape, 0, queries))
        yield put(f"{attn}.k_proj", fused, (narrow, hidden), _heads(shape, queries, queries + 1))
        yield put(
            f"{attn}.v_proj", fused, (narrow, hidden), _heads(shape, queries + 1, queries + 2)
        )
        yield put(f"{attn}.o_proj", f"{ours}.self_attention.linear_proj", (hidden, wide))
        yield put(f"{attn}.q_norm", f"{ours}.self_attention.q_layernorm", (size,))
        yield put(f"{attn}.k_norm", f"{ours}.self_attention.k_layernorm", (size,))
        yield put(f"{hf}.input_layernorm", f"{ours}.input_layernorm", (hidden,))
        yield put(f"{hf}.post_attention_layernorm", f"{ours}.pre_mlp_layernorm", (hidden,))
        fc1 = f"{ours}.mlp.linear_fc1"
        yield put(f"{hf}.mlp.gate_proj", fc1, (inner, hidden), _rows(0, inner))
        yield put(f"{hf}.mlp.up_proj", fc1, (inner, hidden), _rows(inner, 2 * inner))
        yield put(f"{hf}.mlp.down_proj", f"{ours}.mlp.linear_fc2", (hidden, inner))
