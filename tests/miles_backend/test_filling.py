"""Which rows are computed where and together, and to what length a stream is padded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from lilo_miles_backend.ranks.filling import RowCost, bucket, fill, share

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 1200))
def test_every_row_is_in_one_microbatch_and_none_is_over_its_room(
    lengths: list[int], capacity: int
) -> None:
    groups = fill(lengths, capacity)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[index] for index in group) <= capacity or len(group) == 1


@given(LENGTHS, st.integers(1, 1200))
def test_microbatches_are_those_of_first_fit_longest_first(
    lengths: list[int], capacity: int
) -> None:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for one in bins:
            if sum(lengths[i] for i in one) + lengths[index] <= capacity:
                one.append(index)
                break
        else:
            bins.append([index])
    assert fill(lengths, capacity) == [tuple(one) for one in bins]


def test_short_rows_fill_what_long_ones_leave() -> None:
    assert fill([6, 6, 4, 4], 10) == [(0, 2), (1, 3)]


@given(LENGTHS, st.integers(1, 8), st.floats(0, 1))
def test_no_rank_has_more_than_its_share_and_one_row(
    lengths: list[int], ranks: int, per_pair: float
) -> None:
    cost = RowCost(per_token=1.0, per_pair=per_pair)
    shares = share(lengths, ranks, cost)
    assert sorted(index for rows in shares for index in rows) == list(range(len(lengths)))
    loads = [sum(cost.of(lengths[index]) for index in rows) for rows in shares]
    longest = max(map(cost.of, lengths))
    assert max(loads) <= sum(loads) / ranks + longest * (1 + 1e-9)


def test_a_long_row_costs_more_than_its_tokens() -> None:
    lengths = [100, 50, 50, 50, 50]
    assert share(lengths, 2) == [[0, 3], [1, 2, 4]]
    assert share(lengths, 2, RowCost(per_token=1.0, per_pair=1.0)) == [[0], [1, 2, 3, 4]]


@given(st.integers(1, 100_000), st.sampled_from([1, 2, 4, 6, 16]), st.integers(1, 120_000))
def test_a_stream_is_padded_by_less_than_an_eighth_and_never_over_the_room(
    pieces: int, multiple: int, capacity: int
) -> None:
    tokens = pieces * multiple
    padded = bucket(tokens, multiple, capacity)
    assert padded >= tokens
    assert padded % multiple == 0
    assert padded <= max(tokens, capacity)
    assert padded - tokens < max(tokens / 8, 16) * multiple


def test_streams_have_few_lengths() -> None:
    lengths = {bucket(tokens, 1, 1 << 20) for tokens in range(1, (1 << 14) + 1)}
    assert len(lengths) <= 8 * 14
    assert {1 << power for power in range(7, 15)} <= lengths
