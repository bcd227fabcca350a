"""Weights: Hugging Face safetensors into a model of ours, by name, one tensor at a time. `write_weights.py` is the way back.

Of each Hugging Face tensor a rank reads only the rows or columns that it holds, and copies them straight into their
place in the parameter that holds them: the modules that read one input lie one after another in one matrix, each cut
over ranks section by section (`shards.Section`). No full copy exists beside the model, on any rank.

Norm weights that the files store minus one get one added in float32, in which norm weights are kept: in bfloat16 the
sum would lose what the files say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lilo_miles_backend.families.files import open_tensors
from lilo_miles_backend.families.linear import Linear
from lilo_miles_backend.families.shape import LayerKind, ModelShape
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.ranks.sites import LINEARS
from lilo_miles_backend.shards import Range, Section, joined

NORMS: Mapping[str, str] = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mlp_norm",
}
"""A layer's own norms: Hugging Face's name and ours."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters that Megatron pads to a multiple of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one Hugging Face tensor goes."""

    source: str
    """Its name in the files."""
    parameter: str
    """The parameter that holds it."""
    sections: tuple[Section, ...] = ()
    """How it is cut over ranks; none: it is whole on every rank."""
    dim: int = 0
    """The dimension of the tensor that is cut."""
    first_row: int = 0
    """Of the parameter, where this rank's part begins."""
    plus_one: bool = False
    """The file stores the values minus one."""

    def ranges(self, rank: int, size: int) -> tuple[Range, ...]:
        """What rank `rank` of `size` holds along `dim`; nothing: all of it."""
        return joined([r for section in self.sections for r in section.ranges(rank, size)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a model's parameters do not tell of the files they were read from; for writing the same files again."""

    dtypes: Mapping[str, torch.dtype]
    """By Hugging Face name."""
    rests: Mapping[str, torch.Tensor]
    """Of norm weights stored minus one, what adding one in float32 rounded away; float64, where it is not zero."""


def load_weights(
    model: torch.nn.Module, shape: ModelShape, folder: Path, tp: Axis = ALONE
) -> Origin:
    """Fill every parameter of `model` with this rank's part of the safetensors files in `folder`.

    Raises:
        InvalidRequest: a tensor is missing, unexpected, or of another shape; the message names it.
    """
    parameters = dict(model.named_parameters())
    plan = list(placements(shape, tp))
    assert {p.parameter for p in plan} == set(parameters), "the weight map covers the model"
    assert {p.source for p in plan} == set(shape.tensors), "and all of the files"
    for name in set(VOCABULARY) & set(parameters):
        parameters[name].detach().zero_()  # the rows that only pad it are read from no file
    dtypes: dict[str, torch.dtype] = {}
    rests: dict[str, torch.Tensor] = {}
    with open_tensors(folder, shape) as read:
        for one in plan:
            target = held_part(parameters[one.parameter].detach(), one, shape, tp)
            here = 0
            for start, stop in one.ranges(tp.rank, tp.size) or ((None, None),):
                along = slice(start, stop)
                values = read(one.source, (along,) if one.dim == 0 else (slice(None), along))
                dtypes[one.source] = values.dtype
                if one.plus_one:
                    rests |= _add_one(one.source, values, target)
                    continue
                length = values.shape[one.dim]
                part = target.narrow(one.dim, here, length)
                part.copy_(values.view(part.shape))
                here += length
    return Origin(dtypes=dtypes, rests=rests)


def held_part(
    parameter: torch.Tensor, placement: Placement, shape: ModelShape, tp: Axis
) -> torch.Tensor:
    """The view of this rank's parameter that its part of one tensor fills."""
    size = list(shape.tensors[placement.source])
    if placement.sections:
        ranges = placement.ranges(tp.rank, tp.size)
        size[placement.dim] = sum(stop - start for start, stop in ranges)
    return parameter.narrow(0, placement.first_row, size[0])


def vocabulary_rows(shape: ModelShape, tp: Axis) -> slice:
    """The vocabulary entries whose embedding and output weights this rank holds."""
    (section,) = shape.head.sections
    ((start, stop),) = section.ranges(tp.rank, tp.size)
    return slice(start, stop)


def placements(shape: ModelShape, tp: Axis) -> Iterator[Placement]:
    """Every tensor of the files, each once."""
    embedding, head = VOCABULARY
    yield Placement(
        source=f"{shape.prefix}embed_tokens.weight",
        parameter=embedding,
        sections=shape.head.sections,
    )
    if not shape.tie_word_embeddings:
        yield Placement(source="lm_head.weight", parameter=head, sections=shape.head.sections)
    yield Placement(
        source=f"{shape.prefix}norm.weight",
        parameter="decoder.final_layernorm.weight",
        plus_one=shape.norm_offset,
    )
    for index, kind in enumerate(shape.layers):
        hf, ours = f"{shape.prefix}layers.{index}.", f"decoder.layers.{index}."
        for theirs, name in NORMS.items():
            yield Placement(
                source=f"{hf}{theirs}.weight", parameter=ours + name, plus_one=shape.norm_offset
            )
        yield from _linears(shape, kind, hf, ours, tp)
        yield from _softmax(shape, hf, ours) if kind == "softmax" else _delta(shape, hf, ours)


def _linears(
    shape: ModelShape, kind: LayerKind, hf: str, ours: str, tp: Axis
) -> Iterator[Placement]:
    linears = shape.linears(kind)
    for name, modules in LINEARS[kind].items():
        first_row = 0
        for module in modules:
            linear = linears[module]
            yield Placement(
                source=f"{hf}{module}.weight",
                parameter=ours + name,
                sections=linear.sections,
                dim=0 if linear.cut == "out" else 1,
                first_row=first_row,
            )
            first_row += _rows_held(linear, tp)


def _rows_held(linear: Linear, tp: Axis) -> int:
    if linear.cut == "in":
        return linear.out_features
    ranges = [r for section in linear.sections for r in section.ranges(tp.rank, tp.size)]
    return sum(stop - start for start, stop in ranges)


def _softmax(shape: ModelShape, hf: str, ours: str) -> Iterator[Placement]:
    for name in ("q_norm", "k_norm") if shape.qk_norm else ():
        yield Placement(
            source=f"{hf}self_attn.{name}.weight",
            parameter=f"{ours}mixer.{name}",
            plus_one=shape.norm_offset,
        )


def _delta(shape: ModelShape, hf: str, ours: str) -> Iterator[Placement]:
    assert shape.delta is not None, "a model with delta layers has their sizes"
    heads = (Section(start=0, width=1, count=shape.delta.value_heads),)
    attn, mixer = f"{hf}linear_attn.", f"{ours}mixer."
    yield Placement(
        source=f"{attn}conv1d.weight",
        parameter=f"{mixer}conv",
        sections=shape.delta.qkv_sections,
    )
    yield Placement(source=f"{attn}A_log", parameter=f"{mixer}a_log", sections=heads)
    yield Placement(source=f"{attn}dt_bias", parameter=f"{mixer}dt_bias", sections=heads)
    yield Placement(source=f"{attn}norm.weight", parameter=f"{mixer}norm")


def _add_one(source: str, values: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fill `target` with the values plus one; what that rounded away, if anything."""
    target.copy_(values.to(target.dtype) + 1)
    rest = values.double() - (target.double() - 1).cpu()
    return {source: rest} if rest.any() else {}
