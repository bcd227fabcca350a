"""What a layer keeps between forward and backward changes its memory and nothing else: every level has the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from lilo_definitions.trainer import Keep
from lilo_miles_backend.backend import MilesBackend
from lilo_miles_backend.ranks.layers.offload import OffloadedInputs
from lilo_miles_backend.ranks.layers.pieces import cut_pieces, inside
from lilo_miles_backend.ranks.lora import Factors, Segment
from lilo_miles_backend.ranks.side_stream import SideStream
from lilo_miles_backend.ranks.stream import pack

from tests.miles_backend import reference as ref
from tests.miles_backend.late_copies import LateSideStream
from tests.miles_backend.layouts import World, laid_out, world
from tests.miles_backend.random_families import write_model

LEVELS: tuple[Keep, ...] = get_args(Keep)
LENGTHS = {"a": (17, 17, 5), "b": (40, 1)}
RANKS = {"a": 8, "b": 3}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilesBackend]:
    """One rank, two models in a microbatch."""
    definition = write_model(tmp_path_factory.mktemp("models") / "alone", "qwen3_5")
    backend = ref.start(definition.derive(trainer={"pack_models": True}))
    for model_id, lora_rank in RANKS.items():
        backend.create_adapter(model_id, ref.spec(lora_rank))
        ref.randomize(backend, model_id)
    yield backend
    backend.close()


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def cut(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Two tensor- x two context-parallel ranks of a model of each kind of layer."""
    folder = tmp_path_factory.mktemp("cut")
    definition = write_model(folder / request.param, request.param)
    with world(laid_out(definition, tp=2, cp=2, trainer={"pack_models": True}), folder) as ranks:
        for model_id, lora_rank in RANKS.items():
            ranks.create(model_id, ref.spec(lora_rank))
        yield ranks


def _items() -> list[ref.WorkItem]:
    return [
        ref.item(model_id, ref.ragged(lengths, np.random.default_rng(1), vocab=97))
        for model_id, lengths in LENGTHS.items()
    ]


def _keep(rank: Any, levels: Sequence[Keep]) -> None:
    """As a definition's `keep_activations` would, for one rank."""
    rank._batches.limits = replace(rank._batches.limits, levels=lambda _: tuple(levels))


def _numbers_alone(backend: MilesBackend, levels: Sequence[Keep]) -> dict[str, torch.Tensor]:
    _keep(backend.ranks.rank, levels)
    outputs = ref.run(backend, *_items())
    found = {
        f"{model_id} logprobs {row}": torch.from_numpy(values.numpy().copy())
        for model_id, output in zip(LENGTHS, outputs, strict=True)
        for row, values in enumerate(output.logprobs)
    }
    for model_id in LENGTHS:
        for name, gradient in ref.gradients_of(backend, model_id).items():
            found[f"{model_id} {name}"] = gradient.clone()
        backend.drop_gradients(model_id)
    return found


def _mixtures(layers: int) -> list[list[Keep]]:
    """Every level for all layers, and all levels in one model."""
    return [
        *([level] * layers for level in LEVELS),
        [LEVELS[index % len(LEVELS)] for index in range(layers)],
    ]


def test_every_level_and_any_mixture_has_the_same_bits(alone: MilesBackend) -> None:
    found = [_numbers_alone(alone, levels) for levels in _mixtures(4)]
    assert all(value.any() for name, value in found[0].items() if "lora_" in name)
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(other[name], value), name


@contextmanager
def _offloaded(model: Any, side: SideStream | None = None) -> Iterator[OffloadedInputs]:
    """As a definition's `offload_inputs` would; the buffers are smaller than some inputs."""
    inputs = OffloadedInputs(side or SideStream(torch.device("cpu")), usual_bytes=1000)
    model._running.inputs = inputs
    try:
        yield inputs
    finally:
        model._running.inputs = None


def test_inputs_that_wait_in_the_hosts_memory_change_no_bit(alone: MilesBackend) -> None:
    model: Any = alone.ranks.rank._model
    for levels in _mixtures(4):
        wanted = _numbers_alone(alone, levels)
        with _offloaded(model) as inputs:
            for _ in range(2):
                found = _numbers_alone(alone, levels)
                for name, value in wanted.items():
                    assert torch.equal(found[name], value), name
            buffers = [buffer.data_ptr() for buffer in inputs._buffers]
            assert len(buffers) == 4
            _numbers_alone(alone, levels)
            assert buffers == [buffer.data_ptr() for buffer in inputs._buffers]  # used again


def test_copies_of_inputs_that_are_as_late_as_they_may_be_change_no_bit(
    alone: MilesBackend,
) -> None:
    for levels in _mixtures(4):
        wanted = _numbers_alone(alone, levels)
        side = LateSideStream()
        with _offloaded(alone.ranks.rank._model, side):
            for _ in range(2):
                found = _numbers_alone(alone, levels)
                for name, value in wanted.items():
                    assert torch.equal(found[name], value), name
        assert side.late


def test_a_microbatch_that_failed_half_way_leaves_no_inputs_to_the_next(
    alone: MilesBackend,
) -> None:
    model: Any = alone.ranks.rank._model
    levels: list[Keep] = ["input"] * 4
    wanted = _numbers_alone(alone, levels)
    stream = pack((24,), (24,), 0, 1)
    with _offloaded(model):
        model.activate()
        model.hidden(torch.arange(24)[None], stream, with_grad=True)  # and nothing goes back
        model.hidden(torch.arange(24)[None], stream, with_grad=False)
        found = _numbers_alone(alone, levels)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_layers_whose_inputs_are_away_keep_that_much_less(alone: MilesBackend) -> None:
    model: Any = alone.ranks.rank._model
    tokens, ids = 24, torch.arange(24)[None]
    stream = pack((tokens,), (tokens,), 0, 1)
    model.activate()
    for level in LEVELS:
        model.keep([level] * 4)
        here = _kept_bytes(model.hidden(ids, stream, with_grad=True))
        with _offloaded(model):
            away = _kept_bytes(model.hidden(ids, stream, with_grad=True))
        size = 4 * tokens * model.shape.hidden_size
        assert [a - b for a, b in zip(here, away, strict=True)] == [size] * 4


@pytest.mark.slow
def test_levels_have_the_same_bits_where_ranks_cut_model_and_rows(cut: World) -> None:
    layers = len(cut.call(_levels_of)[0])
    found: list[dict[str, torch.Tensor]] = []
    mixtures = _mixtures(layers)
    for away, levels in [*((False, one) for one in mixtures), (True, mixtures[-1])]:
        cut.call(_send_inputs, away)
        cut.call(_keep_those, levels)
        cut.run(*_items())
        found.append({})
        for model_id in LENGTHS:
            gradients = cut.gradients(model_id)
            found[-1] |= {f"{model_id} {name}": value for name, value in gradients.items()}
            cut.drop_gradients(model_id)
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(other[name], value), name
    cut.call(_send_inputs, False)


@pytest.mark.slow
def test_tensor_parallel_ranks_keep_a_share_of_the_tokens_each(cut: World) -> None:
    # 20 tokens are 10 on each context-parallel rank, of which each tensor-parallel one keeps 5.
    for tokens, share in ((20, 5), (28, 7)):
        kept = cut.call(_kept_rows, tokens)
        assert all(kept)
        assert {rows for rank in kept for rows in rank} == {share}


def _kept_rows(rank: Any, tokens: int) -> list[int]:
    """How many tokens' input each layer keeps of a row, the layer that runs last first."""
    model = rank._model
    stream = pack((tokens,), (tokens,), model.parallel.cp.rank, 2)
    model.activate()
    model.keep(["input"] * len(model.levels))
    ids = torch.zeros(1, tokens // 2, dtype=torch.int64)
    node: Any = model.hidden(ids, stream, with_grad=True).grad_fn
    found: list[int] = []
    while node is not None:
        if kept := getattr(node, "kept", None):
            found.append(kept.x.shape[0])
        node = node.next_functions[0][0] if node.next_functions else None
    return found


def _send_inputs(rank: Any, away: bool) -> None:
    side = SideStream(torch.device("cpu"))
    rank._model._running.inputs = OffloadedInputs(side, usual_bytes=0) if away else None


def _levels_of(rank: Any) -> tuple[Keep, ...]:
    return rank._model.levels


def _keep_those(rank: Any, levels: Sequence[Keep]) -> None:
    _fixed.levels = tuple(levels)
    rank._batches.limits = replace(rank._batches.limits, levels=_fixed)


class _Fixed:
    """Levels whatever the tokens; a class, since ranks are told by pickle."""

    levels: tuple[Keep, ...] = ()

    def __call__(self, tokens: int) -> tuple[Keep, ...]:
        return self.levels


_fixed = _Fixed()


def test_each_level_keeps_what_it_says_and_no_more(alone: MilesBackend) -> None:
    model: Any = alone.ranks.rank._model
    tokens = 24
    stream = pack((tokens,), (tokens,), 0, 1)
    model.activate()
    held: dict[Keep, list[int]] = {}
    for level in LEVELS:
        model.keep([level] * 4)
        ids = torch.arange(tokens)[None]
        hidden = model.hidden(ids, stream, with_grad=True)
        held[level] = _kept_bytes(hidden)
    shape = model.shape
    kinds = [1 if kind == "softmax" else 0 for kind in shape.layers]
    softmax = kinds.index(1)
    hidden_size, inner = shape.hidden_size, shape.intermediate_size
    heads, width = shape.num_attention_heads, shape.num_attention_heads * shape.head_dim
    projected = 2 * width + 2 * shape.num_key_value_heads * shape.head_dim  # with the output's gate
    per_token = {"input": hidden_size}
    per_token["attention"] = per_token["input"] + hidden_size + width + heads
    per_token["qkv"] = per_token["attention"] + projected
    per_token["all"] = per_token["qkv"] + 2 * inner
    for level in LEVELS:
        assert held[level][softmax] == 4 * tokens * per_token[level], level
    for less, more in pairwise(LEVELS):
        assert all(a < b for a, b in zip(held[less], held[more], strict=True)), (less, more)


def _kept_bytes(hidden: torch.Tensor) -> list[int]:
    """What each layer's node holds, the first layer first."""
    found: list[int] = []
    node: Any = hidden.grad_fn
    while node is not None:
        if kept := getattr(node, "kept", None):
            parts = [getattr(kept, field.name) for field in fields(kept)]
            found.append(sum(map(_bytes, parts)))
        node = node.next_functions[0][0] if node.next_functions else None
    return found[::-1]


def _bytes(part: Any) -> int:
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size()
    return sum(map(_bytes, part or ()))


def test_an_mlp_in_pieces_has_the_numbers_of_one_in_one(alone: MilesBackend) -> None:
    model: Any = alone.ranks.rank._model
    levels: list[Keep] = ["all", "input", "all", "qkv"]
    whole = _numbers_alone(alone, levels)
    sizes = [layer._mlp._piece_tokens for layer in model._layers]
    assert set(sizes) == {8192}
    try:
        for layer in model._layers:
            layer._mlp._piece_tokens = 16
        pieces = _numbers_alone(alone, levels)
    finally:
        for layer in model._layers:
            layer._mlp._piece_tokens = 8192
    for name, value in whole.items():
        assert ref.relative(pieces[name], value) <= 1e-5, name


@pytest.mark.parametrize("seed", range(20))
def test_where_an_adapters_tokens_are_cut_does_not_depend_on_its_neighbours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before, after = (rng.integers(0, 40, rng.integers(1, 6)).tolist() for _ in range(2))
    size = int(rng.integers(1, 17))
    own = 37

    def cuts(lengths: list[int], index: int) -> set[int]:
        ends = np.cumsum([0, *lengths]).tolist()
        segments = [_segment(slice(a, b)) for a, b in pairwise(ends)]
        pieces = cut_pieces(ends[-1], segments, size)
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == ends[-1]
        assert all(piece.stop - piece.start <= size for piece in pieces)
        covered = sum(
            len(range(*segment.tokens.indices(size)))
            for piece in pieces
            for segment in inside(segments, piece, ends[-1])
        )
        assert covered == ends[-1]
        first, last = ends[index], ends[index + 1]
        return {piece.stop - first for piece in pieces if first < piece.stop < last}

    alone = cuts([own], 0)
    assert cuts([*before, own, *after], len(before)) == alone


def _segment(tokens: slice) -> Segment:
    empty = torch.empty(0, 0)
    factors = Factors(scale=1.0, lora_rank=0, a=empty, b=empty, grad_a=empty, grad_b=empty)
    return Segment(factors=factors, tokens=tokens)
