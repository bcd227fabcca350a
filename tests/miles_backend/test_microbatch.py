"""Cutting rows into microbatches and putting results back, for any lengths; slots over any sequence of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_engine.errors import NotFound, Saturated
from lilo_engine.operations.operation import ModelId
from lilo_miles_backend.ranks.microbatch import assemble, cut, in_order
from lilo_miles_backend.ranks.rows import make_row
from lilo_miles_backend.ranks.slots import SlotTable

from tests.miles_backend import reference as ref

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 120))
def test_every_row_is_in_one_group_and_no_group_is_over_the_limit(
    lengths: list[int], max_tokens: int
) -> None:
    groups = cut(lengths, max_tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[index] for index in group) * len(group)
        assert padded <= max_tokens or len(group) == 1


@given(LENGTHS)
def test_the_cut_depends_on_nothing_but_the_lengths(lengths: list[int]) -> None:
    assert cut(lengths, 64) == cut(list(lengths), 64)
    order = [index for group in cut(lengths, 64) for index in group]
    assert order == sorted(range(len(lengths)), key=lambda i: -lengths[i])


@given(LENGTHS, st.integers(1, 120))
@settings(max_examples=40)
def test_results_come_back_row_by_row_in_the_items_order(
    lengths: list[int], max_tokens: int
) -> None:
    rng = np.random.default_rng(0)
    rows = [make_row(ref.datum(n, rng, vocab=97, weights=rng.normal(size=n))) for n in lengths]
    microbatches = [assemble(rows, group) for group in cut(lengths, max_tokens)]
    # What a model would see at each real token, read at the positions that the pass reads.
    parts = [
        (part, part.tokens_BS.T.reshape(-1)[part.positions_N][:, None]) for part in microbatches
    ]
    for row, found in zip(rows, in_order(parts, rows), strict=True):
        assert np.array_equal(found, row.tokens)
    weights = [(part, part.inputs["weights"]) for part in microbatches]
    for row, found in zip(rows, in_order(weights, rows), strict=True):
        assert np.array_equal(found, row.inputs["weights"][:, 0])


def test_an_input_that_only_some_rows_have_is_filled_with_its_meaning() -> None:
    rng = np.random.default_rng(0)
    bound = np.full(3, 1.5)
    rows = [
        make_row(ref.datum(3, rng, vocab=97, clip_high_threshold=bound, weights=bound)),
        make_row(ref.datum(2, rng, vocab=97)),
    ]
    inputs = assemble(rows, (0, 1)).inputs
    assert inputs["weights"][:, 0].tolist() == [1.5, 1.5, 1.5, 1.0, 1.0]
    assert np.isnan(inputs["clip_high_threshold"][3:]).all()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_slots_never_share_an_index_and_generations_never_recur(
    events: list[tuple[bool, int]],
) -> None:
    table, held, seen = SlotTable(3), {}, set()
    for take, number in events:
        model = ModelId(f"m{number}")
        if not take:
            table.free(model)
            held.pop(model, None)
        elif model in table:
            assert table.of(model) == held[model]
        elif len(held) == 3:
            with pytest.raises(Saturated):
                table.take(model)
        else:
            slot = table.take(model)
            assert slot.index not in {other.index for other in held.values()}
            assert slot.generation not in seen
            held[model] = slot
            seen.add(slot.generation)
    with pytest.raises(NotFound):
        table.of(ModelId("nobody"))
