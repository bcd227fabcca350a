"""How long a row must be: by hand, by trying, and for any lengths."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_definitions import Definition, Topology
from lilo_engine.errors import InvalidRequest
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.ranks.alignment import Alignment, required_multiple
from lilo_miles_backend.ranks.filling import share
from lilo_miles_backend.ranks.stream import pack

from tests.miles_backend import reference as ref

DEGREES = range(1, 9)


def rule(mode: str, tp: int = 1, cp: int = 1) -> Alignment:
    topology = Topology(tp=tp, cp=cp, align_sequences_to_parallel_layout=mode)
    return Alignment.of(topology, sequence_parallel=False)


def test_eleven_tokens_at_tp8_cp3_become_48_when_rows_are_always_aligned() -> None:
    row = rule("on", tp=8, cp=3).row(10)
    assert (row.tokens, row.targets, row.zero_weights, row.logprobs) == (48, 47, 37, 10)


def test_the_multiple_is_the_least_number_that_the_layout_can_cut() -> None:
    for tp, cp, sequence_parallel in product(DEGREES, DEGREES, (False, True)):
        wanted = next(
            n
            for n in range(1, 2 * tp * cp + 1)
            if (cp == 1 or n % (2 * cp) == 0) and (not sequence_parallel or n // cp % tp == 0)
        )
        assert required_multiple(tp, cp, sequence_parallel) == wanted, (tp, cp)


def test_rows_are_padded_by_the_least_that_is_needed_unless_always_aligned() -> None:
    for tp, cp, length in product(DEGREES, DEGREES, range(1, 40)):
        auto, on = rule("auto", tp, cp), rule("on", tp, cp)
        assert 0 <= auto.padded(length) - length < auto.multiple
        assert on.multiple == 2 * tp * cp
        assert on.padded(length) > length
        assert on.padded(length) % on.multiple == 0


def test_a_row_that_needs_padding_is_refused_where_that_is_off_and_the_multiple_named() -> None:
    off = rule("off", tp=2, cp=2)
    assert off.padded(8) == 8
    with pytest.raises(InvalidRequest, match="multiple of 4"):
        off.padded(7)
    assert rule("off").padded(7) == 7  # one rank needs none


def test_n_positions_give_n_logprobs_up_to_the_whole_context_however_rows_are_padded(
    random_models: dict[str, Definition], tied_backend: MilesBackend, model_id: str
) -> None:
    definition = random_models["tied"].derive(topology={"align_sequences_to_parallel_layout": "on"})
    lengths = (1, 2, 3, 10, 11, definition.context)
    datums = ref.ragged(lengths, np.random.default_rng(0), vocab=97)
    padded = ref.start(definition)
    outputs: list[ref.Output] = []
    for backend in (padded, tied_backend):
        backend.create_adapter(model_id, ref.spec(4))
        outputs += ref.run(backend, ref.item(model_id, datums), forward_only=True)
    padded.close()
    ours, theirs = outputs
    assert ours.error is None
    assert [one.shape for one in ours.logprobs] == [(length,) for length in lengths]
    for left, right in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert np.abs(left.numpy() - right.numpy()).max() <= 1e-5
    assert ours.metrics["padded_tokens:sum"] > theirs.metrics["padded_tokens:sum"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 8))
@settings(max_examples=60)
def test_ranks_have_every_token_once_and_equal_shares_that_cost_the_same(
    lengths: list[int], cp: int
) -> None:
    padded = [rule("auto", cp=cp).padded(length) for length in lengths]
    streams = [pack(lengths, padded, rank, cp) for rank in range(cp)]
    assert sorted(np.concatenate([one.places for one in streams])) == list(range(sum(padded)))
    starts = np.concatenate(([0], np.cumsum(padded)[:-1]))
    row_of = np.repeat(np.arange(len(padded)), padded)
    for one in streams:
        assert one.places.size == sum(padded) // cp
        assert np.array_equal(
            row_of[one.places], np.repeat(range(len(padded)), np.array(padded) // cp)
        )
        positions = one.places - starts[row_of[one.places]]
        assert np.array_equal(one.is_real, positions < np.array(lengths)[row_of[one.places]])
        assert np.array_equal(one.positions[one.is_real], positions[one.is_real])
        assert one.positions.max() < max(lengths)
        # Causal attention costs a token its position; zigzag makes the sums equal.
        assert positions.sum() * cp == sum(n * (n - 1) // 2 for n in padded)


def test_a_row_without_a_token_fills_the_stream_up() -> None:
    one = pack([5, 0], [8, 8], 1, 2)
    assert one.places.tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert one.is_real.tolist() == [True] * 3 + [False] * 5
    assert one.positions.tolist() == [2, 3, 4, 4, 0, 0, 0, 0]
    assert (one.lengths, one.padded) == ((5, 0), (8, 8))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 8))
def test_rows_are_shared_out_once_and_no_rank_has_much_more_than_another(
    lengths: list[int], ranks: int
) -> None:
    shares = share(lengths, ranks)
    assert sorted(row for rows in shares for row in rows) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in rows) for rows in shares]
    assert max(loads) - min(loads) <= max(lengths)
