"""Gated delta nets: equal to the definition token by token, in float64, packed and over context-parallel ranks."""

from __future__ import annotations

import pytest

from tests.miles_backend import reference as ref
from tests.miles_backend.delta_ranks import Case, Fault, over_ranks, token_by_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXACT = 1e-12
"""max|d| / max|ref|, float64 on both sides."""
LENGTHS = (70, 1, 2, 33, 3, 5, 1)


@pytest.mark.parametrize(("cp", "multiple"), [(1, 1), (2, 4), (3, 6)])
def test_rows_of_a_stream_have_the_numbers_that_each_has_token_by_token(
    cp: int, multiple: int
) -> None:
    case = Case.of(LENGTHS, multiple)
    for ours, theirs in zip(over_ranks(case, cp), token_by_token(case), strict=True):
        assert ref.relative(ours, theirs) <= EXACT


@pytest.mark.parametrize(("fault", "cp"), [("leak", 1), ("order", 2), ("maps", 2), ("halo", 2)])
def test_rows_that_leak_and_ranks_that_keep_silent_are_seen_by_the_same_comparison(
    fault: Fault, cp: int
) -> None:
    case = Case.of(LENGTHS, 4)
    ours, theirs = over_ranks(case, cp, fault), token_by_token(case)
    assert ref.relative(ours[1], theirs[1]) > 1e-3
