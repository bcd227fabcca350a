"""What is kept of finished samples, without engines."""

from __future__ import annotations

import pytest
from lilo_engine.errors import Gone, NotFound
from lilo_engine.sampling import futures
from lilo_engine.sampling.engine import SampledSequence, SampleResult
from lilo_engine.sampling.futures import Sampled, SampleFutures

pytestmark = pytest.mark.anyio


class Clock:
    """Seconds that pass when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sampled(size_bytes: int = 8) -> Sampled:
    sequence = SampledSequence(tokens=b"0" * size_bytes, logprobs=b"", stop_reason="length")
    return Sampled(result=SampleResult(sequences=(sequence,)))


def finished(kept: SampleFutures, seq_id: int, size_bytes: int = 8):
    future = kept.open(session_id="s", seq_id=seq_id, fingerprint="f", num_samples=1)
    kept.settle(future, sampled(size_bytes))
    return future


async def test_an_answer_is_forgotten_when_it_is_too_old():
    clock = Clock()
    kept = SampleFutures(max_finished=10, max_age_s=60.0, now=clock)
    old = finished(kept, 0)
    clock.now = 59.0
    finished(kept, 1)
    assert kept.get(old.request_id) is old
    clock.now = 61.0
    young = finished(kept, 2)
    with pytest.raises(NotFound):
        kept.get(old.request_id)
    assert kept.get(young.request_id) is young


async def test_fetched_answers_are_bounded_in_bytes_and_the_newest_stays(monkeypatch):
    monkeypatch.setattr(futures, "MAX_FETCHED_BYTES", 100)
    kept = SampleFutures(max_finished=10, max_age_s=60.0)
    waiting = finished(kept, 0, 1000)
    first, second, large = (finished(kept, i, size) for i, size in ((1, 60), (2, 60), (3, 500)))
    for future in (first, second, large):
        kept.fetched(future)
    for gone in (first, second):
        with pytest.raises(NotFound):
            kept.get(gone.request_id)
    assert kept.get(large.request_id) is large
    assert kept.get(waiting.request_id) is waiting


async def test_answers_that_nobody_fetched_are_bounded_in_bytes_and_the_newest_stays(monkeypatch):
    monkeypatch.setattr(futures, "MAX_UNFETCHED_BYTES", 100)
    kept = SampleFutures(max_finished=10, max_age_s=60.0)
    first, second = finished(kept, 0, 60), finished(kept, 1, 60)
    with pytest.raises(NotFound):
        kept.get(first.request_id)
    assert kept.get(second.request_id) is second
    kept.fetched(second)
    third, large = finished(kept, 2, 90), finished(kept, 3, 500)
    with pytest.raises(NotFound):
        kept.get(third.request_id)
    assert kept.get(large.request_id) is large
    assert kept.get(second.request_id) is second


async def test_the_first_outcome_stays():
    kept = SampleFutures(max_finished=10, max_age_s=60.0)
    future = finished(kept, 0)
    first = future.outcome
    kept.settle(future, sampled(16))
    assert future.outcome is first
    assert kept.num_unfinished == 0


async def test_a_request_that_ends_after_its_session_was_forgotten_is_not_kept():
    kept = SampleFutures(max_finished=10, max_age_s=60.0)
    future = kept.open(session_id="s", seq_id=0, fingerprint="f", num_samples=1)
    assert kept.forget("s") == [future]
    kept.settle(future, sampled())
    assert kept.num_unfinished == 0
    with pytest.raises(Gone):
        kept.get(future.request_id)
    with pytest.raises(Gone):
        kept.find("s", 1, "f")
