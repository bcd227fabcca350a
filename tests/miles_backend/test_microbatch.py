"""Cutting rows into microbatches and putting results back, for any lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_miles_backend.ranks.microbatch import assemble, cut, in_order
from lilo_miles_backend.ranks.rows import make_row

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
def test_rows_are_cut_longest_first_and_equal_ones_in_the_clients_order(lengths: list[int]) -> None:
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
        (part, part.tokens_BS.T.reshape(-1)[part.positions_n][:, None]) for part in microbatches
    ]
    back = in_order(parts, rows)
    assert sorted(back) == list(range(len(rows)))
    for index, row in enumerate(rows):
        assert np.array_equal(back[index], row.tokens)
    weights = [(part, part.inputs["weights"]) for part in microbatches]
    back = in_order(weights, rows)
    for index, row in enumerate(rows):
        assert np.array_equal(back[index], row.inputs["weights"][:, 0])


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
