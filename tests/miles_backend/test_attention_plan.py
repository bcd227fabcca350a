"""Which calls a stream becomes: every real row in one, long rows alone, short ones together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_miles_backend.ranks.attention_plan import (
    REMEMBERED,
    DenseCall,
    DenseRule,
    plan_calls,
    stretches,
)
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    AttentionKernels,
)
from lilo_miles_backend.ranks.kernels.attention_merge import merge_
from lilo_miles_backend.ranks.kernels.attention_reference import (
    CpuAttention,
    PlainPackedAttention,
)

CPU = torch.device("cpu")
ALWAYS = AttentionKernels(
    dense=CpuAttention(),
    packed=None,
    merge=merge_,
    dense_from=0,
    dense_at_once_from=0,
    description="no packed calls, as on a CPU",
)
PACKS = AttentionKernels(
    dense=CpuAttention(),
    packed=PlainPackedAttention(),
    merge=merge_,
    dense_from=12,
    dense_at_once_from=12,
    description="short rows in packed calls, as on a GPU",
)


@given(
    st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_every_real_row_is_in_one_call_and_only_rows_of_one_length_share_a_dense_one(
    shares: list[int], cp: int, dense_from: int
) -> None:
    size = 2**cp
    here = [2 * share for share in shares]
    padded = [length * size for length in here]
    lengths = [length if index % 4 else 0 for index, length in enumerate(padded)]
    rule = DenseRule(replace(PACKS, dense_from=dense_from, dense_at_once_from=dense_from))
    calls = plan_calls(lengths, padded, cp_rank=0, cp_size=size, is_dense=rule, device=CPU)
    starts = np.concatenate(([0], np.cumsum(here)))
    covered = [token for call in calls for token in range(call.tokens.start, call.tokens.stop)]
    wanted = [
        token
        for index, length in enumerate(lengths)
        if length
        for token in range(starts[index], starts[index + 1])
    ]
    assert covered == wanted
    for call in calls:
        rows = [i for i in range(len(here)) if call.tokens.start <= starts[i] < call.tokens.stop]
        if isinstance(call, DenseCall):
            assert {here[i] for i in rows} == {call.length}
            assert call.rows * call.length**2 >= dense_from**2
        else:
            assert all(part.bounds.queries.diff().tolist() for part in call.parts)
            assert len(call.parts) == (1 if size == 1 else 2)


def test_long_rows_are_dense_calls_and_a_run_of_short_ones_is_one_packed_call() -> None:
    rule = DenseRule(replace(PACKS, dense_from=2048, dense_at_once_from=2048))
    found = stretches([32768, 4096, 4096, 1000, 700, 700, 3], rule)
    assert found == [(1, True), (2, True), (4, False)]
    assert stretches([1024] * 16, rule) == [(16, True)]
    assert stretches([9, 9, 3], DenseRule(ALWAYS)) == [(2, True), (1, True)]


def test_a_shape_that_is_dear_to_prepare_for_is_a_dense_call_only_once_it_comes_again() -> None:
    rule = DenseRule(replace(PACKS, dense_from=2048, dense_at_once_from=16384))
    assert stretches([16384, 5000, 4096, 4096], rule) == [(1, True), (3, False)]
    assert stretches([16384, 5001, 4096, 4096], rule) == [(1, True), (1, False), (2, True)]
    for length in range(6000, 6000 + REMEMBERED):
        assert stretches([length], rule) == [(1, False)]
    assert stretches([4096, 4096], rule) == [(2, False)]
