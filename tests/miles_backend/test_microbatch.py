"""Rows as the arrays of a stream, whole or in the parts of context-parallel ranks, and back, for any lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_miles_backend.ranks.alignment import Alignment
from lilo_miles_backend.ranks.filling import fill
from lilo_miles_backend.ranks.microbatch import Layout, assemble
from lilo_miles_backend.ranks.rows import make_row

from tests.miles_backend import reference as ref

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 120), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_token_of_every_row_is_on_one_rank_with_its_own_inputs_and_place(
    lengths: list[int], capacity: int, cp: int, buckets: bool
) -> None:
    rng = np.random.default_rng(0)
    rows = [make_row(ref.datum(n, rng, vocab=97, weights=rng.normal(size=n))) for n in lengths]
    firsts = np.cumsum([0, *lengths[:-1]]).tolist()
    answers = np.full(sum(lengths), -1, dtype=np.int64)
    weights = np.full(sum(lengths), np.nan, dtype=np.float32)
    targets = answers.copy()
    alignment = Alignment(mode="auto", multiple=1 if cp == 1 else 2 * cp)
    for rank in range(cp):
        layout = Layout(
            alignment=alignment,
            cp_rank=rank,
            cp_size=cp,
            bucket_tokens=capacity * cp if buckets else None,
        )
        sizes = [alignment.padded(n) for n in lengths]
        for group in fill(sizes, capacity * cp):
            part = assemble(rows, group, layout, firsts)
            places = part.answers_nk[:, 0]
            assert (answers[places] == -1).all()  # on no other rank
            answers[places] = part.tokens_T[part.places_n]
            targets[places] = part.targets_nk[:, 0]
            weights[places] = part.inputs["weights"][:, 0]
            assert [part.rows[row] for row in part.rows_n] == [
                np.searchsorted(firsts, place, side="right") - 1 for place in places
            ]
            assert part.is_prefix == (part.stream.is_real[: places.size].all())
            assert part.tokens_T.size * cp >= sum(sizes[index] for index in group)
    assert np.array_equal(answers, np.concatenate([row.tokens for row in rows]))
    assert np.array_equal(targets, np.concatenate([row.targets[:, 0] for row in rows]))
    assert np.array_equal(weights, np.concatenate([row.inputs["weights"][:, 0] for row in rows]))


def test_an_input_that_only_some_rows_have_is_filled_with_its_meaning() -> None:
    rng = np.random.default_rng(0)
    bound = np.full(3, 1.5)
    rows = [
        make_row(ref.datum(3, rng, vocab=97, clip_high_threshold=bound, weights=bound)),
        make_row(ref.datum(2, rng, vocab=97)),
    ]
    inputs = assemble(rows, (0, 1), Layout(), (0, 3)).inputs
    assert inputs["weights"][:, 0].tolist() == [1.5, 1.5, 1.5, 1.0, 1.0]
    assert np.isnan(inputs["clip_high_threshold"][3:]).all()


def test_rows_with_fewer_targets_than_their_neighbours_answer_and_weigh_only_those() -> None:
    rng = np.random.default_rng(0)
    narrow = make_row(ref.datum(2, rng, vocab=97))
    targets = ref.Tensor.of(rng.integers(0, 97, (3, 2)), "int64")
    tokens = ref.Tensor.of(rng.integers(0, 97, 3), "int32")
    wide = make_row(ref.Datum(tokens=tokens, loss_inputs={"target_tokens": targets}))
    part = assemble([narrow, wide], (0, 1), Layout(), (0, 2))
    assert part.answers_nk.tolist() == [[0, -1], [1, -1], [2, 3], [4, 5], [6, 7]]
    # What pads a row weighs nothing, though no client gave weights.
    assert part.inputs["weights"].tolist() == [[1, 0], [1, 0], [1, 1], [1, 1], [1, 1]]
