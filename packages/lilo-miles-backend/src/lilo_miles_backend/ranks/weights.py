"""Weights: Hugging Face safetensors into a Megatron model, by name, one tensor at a time.

Of each Hugging Face tensor a rank reads only the rows or columns that it holds, and copies them straight into their
place: query, key and value rows into the fused matrix that Megatron groups by key/value head, gate and up rows into
one matrix. No full copy exists beside the model, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lilo_miles_backend.families.files import open_tensors
from lilo_miles_backend.families.shape import ModelShape
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.shards import shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one Hugging Face tensor goes."""

    source: str
    """Its name in the files."""
    parameter: str
    """The Megatron parameter that holds it."""
    cut: int | None
    """The dimension of which each tensor-parallel rank holds a part; None: the whole tensor is on every rank."""
    place: Callable[[torch.Tensor], torch.Tensor]
    """From this rank's parameter to the view that its part of the tensor fills (any shape of as many elements)."""


def load_weights(model: torch.nn.Module, shape: ModelShape, folder: Path, tp: Axis = ALONE) -> None:
    """Fill every parameter of `model` with this rank's part of the safetensors files in `folder`.

    Raises:
        InvalidRequest: a tensor is missing, unexpected, or of another shape; the message names it.
    """
    parameters = dict(model.named_parameters())
    placements = list(_placements(shape, tp))
    assert {p.parameter for p in placements} == set(parameters), "the weight map covers the model"
    assert {p.source for p in placements} == set(shape.tensors), "and all of the files"
    with open_tensors(folder, shape) as read:
        for placement in placements:
            index = None
            if placement.cut is not None and tp.is_split:
                rows, columns = shape.tensors[placement.source]
                ((start, stop),) = shard((rows, columns), placement.cut, tp.rank, tp.size).ranges
                along = slice(start, stop)
                index = (along,) if placement.cut == 0 else (slice(None), along)
            part = read(placement.source, index)
            target = placement.place(parameters[placement.parameter].detach())
            target.copy_(part.view(target.shape))


def vocabulary_rows(shape: ModelShape, tp: Axis) -> slice:
    """The vocabulary entries whose embedding and output weights this rank holds."""
    ((start, stop),) = shape.head.sections[0].ranges(tp.rank, tp.size)
    return slice(start, stop)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


def _rows(start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parameter: parameter[start:stop]


def _padded(rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """The last rank's part of a vocabulary that does not divide has fewer rows; Megatron's matrix has zeros there."""

    def place(parameter: torch.Tensor) -> torch.Tensor:
        count = rows.stop - rows.start
        parameter[count:] = 0
        return parameter[:count]

    return place


def _heads(shape: ModelShape, start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Heads `start` to `stop` of each key/value group of a fused matrix [G * (Q + 2) * D, hidden]."""
    per_group = shape.queries_per_group + 2
    return lambda parameter: parameter.view(-1, per_group, shape.head_dim, parameter.shape[-1])[
        :, start:stop
    ]


def _placements(shape: ModelShape, tp: Axis) -> Iterator[Placement]:
    def put(
        source: str,
        parameter: str,
        cut: int | None = None,
        place: Callable[[torch.Tensor], torch.Tensor] = _whole,
    ) -> Placement:
        return Placement(
            source=f"{source}.weight", parameter=f"{parameter}.weight", cut=cut, place=place
        )

    vocabulary = _padded(vocabulary_rows(shape, tp))
    yield put("model.embed_tokens", "embedding.word_embeddings", 0, vocabulary)
    yield put("model.norm", "decoder.final_layernorm")
    if not shape.tie_word_embeddings:
        yield put("lm_head", "output_layer", 0, vocabulary)
    queries, inner = shape.queries_per_group, shape.intermediate_size // tp.size
    for layer in range(shape.num_hidden_layers):
        hf, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attn, fused = f"{hf}.self_attn", f"{ours}.self_attention.linear_qkv"
        yield put(f"{attn}.q_proj", fused, 0, _heads(shape, 0, queries))
        yield put(f"{attn}.k_proj", fused, 0, _heads(shape, queries, queries + 1))
        yield put(f"{attn}.v_proj", fused, 0, _heads(shape, queries + 1, queries + 2))
        yield put(f"{attn}.o_proj", f"{ours}.self_attention.linear_proj", 1)
        yield put(f"{attn}.q_norm", f"{ours}.self_attention.q_layernorm")
        yield put(f"{attn}.k_norm", f"{ours}.self_attention.k_layernorm")
        yield put(f"{hf}.input_layernorm", f"{ours}.input_layernorm")
        yield put(f"{hf}.post_attention_layernorm", f"{ours}.pre_mlp_layernorm")
        fc1 = f"{ours}.mlp.linear_fc1"
        yield put(f"{hf}.mlp.gate_proj", fc1, 0, _rows(0, inner))
        yield put(f"{hf}.mlp.up_proj", fc1, 0, _rows(inner, 2 * inner))
        yield put(f"{hf}.mlp.down_proj", f"{ours}.mlp.linear_fc2", 1)
