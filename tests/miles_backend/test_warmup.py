"""Warm-up: which passes, and that nothing is left of them; here on the CPU, where a rank does without."""

from __future__ import annotations

import pytest
from lilo_definitions import Definition, get
from lilo_engine.operations.operation import LoraSpec, ModelId
from lilo_miles_backend.ranks.filling import share
from lilo_miles_backend.ranks.warmup import warm_passes, warm_up

from tests.miles_backend import reference as ref

SPEC = LoraSpec(
    lora_rank=1, alpha=1.0, seed=1, train_attn=True, train_mlp=False, train_unembed=False
)


def _tiny(**changes: object) -> Definition:
    return get("tiny").derive(**changes)


def test_every_class_of_rank_up_to_the_highest_is_warmed_with_long_and_short_rows() -> None:
    definition = _tiny(lora={"max_rank": 32})
    passes = warm_passes(definition)
    assert {one.lora_ranks for one in passes} == {(32,), (16,), (8,), (1,)}
    assert max(passes[0].lengths) == min(definition.context, 4608)
    assert len(passes[1].lengths) > 1


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_every_data_parallel_rank_gets_rows_of_all_lengths(dp: int) -> None:
    for one in warm_passes(_tiny(topology={"dp": dp}, trainer={"pack_models": True})):
        lengths = one.lengths * len(one.lora_ranks)
        shares = share(lengths, dp)
        assert {lengths[row] for row in shares[0]} == set(lengths)
        assert all(len(shares[0]) == len(rows) for rows in shares)


def test_rows_that_would_be_padded_are_not_used_where_none_may_be() -> None:
    topology = {"cp": 3, "align_sequences_to_parallel_layout": "off"}
    for one in warm_passes(_tiny(topology=topology)):
        assert all(length % 6 == 0 for length in one.lengths)


def test_models_are_warmed_together_where_they_are_packed() -> None:
    definition = _tiny(lora={"max_rank": 32}, trainer={"pack_models": True})
    assert {(32, 32), (32, 8)} <= {one.lora_ranks for one in warm_passes(definition)}


def test_a_low_highest_rank_warms_nothing_above_it() -> None:
    definition = _tiny(lora={"max_rank": 4}, trainer={"pack_models": True})
    assert {one.lora_ranks for one in warm_passes(definition)} == {(4,), (1,), (4, 4), (4, 1)}


def test_nothing_is_left_of_a_warm_up() -> None:
    definition = _tiny(trainer={"pack_models": True})
    backend = ref.start(definition)
    moves: list[None] = []
    try:
        rank = backend.ranks.rank
        residents, batches = rank._residents, rank._batches
        warm_up(definition, rank._model, batches, residents, moved=lambda: moves.append(None))
        assert len(moves) == len(warm_passes(definition))
        for number in range(definition.lora.slots):  # all slots are free
            backend.create_adapter(ModelId(f"m-{number}"), SPEC)
    finally:
        backend.close()
