"""Worker: what its health says of the one torch thread."""

from __future__ import annotations

import threading

import pytest
import torch
from lilo_definitions import resolve_source
from lilo_miles_backend.sampler.batch import Batch
from lilo_miles_backend.sampler.model import Model
from lilo_miles_backend.sampler.weights import read_base
from lilo_miles_backend.sampler.worker import Worker


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def batch(definition):
    folder = resolve_source(definition.model.source)
    base = read_base(folder, dtype=torch.float32, device=torch.device("cpu"))
    return Batch(Model(base), max_rows=1, max_length=8)


def test_work_that_comes_after_an_idle_hour_has_not_been_stuck_for_that_hour(batch):
    clock, reached, gate = Clock(), threading.Event(), threading.Event()
    worker = Worker(batch, num_threads=1, now=clock)

    def hold(_: Batch) -> None:
        reached.set()
        assert gate.wait(20), "the thread was never let go"

    worker.post(hold)
    assert reached.wait(20)
    clock.now_s = 3600.0
    # The thread has not taken it yet when somebody asks.
    worker.post(lambda _: None)
    health = worker.health()
    gate.set()
    assert worker.stop(20)
    assert (health.waiting, health.age_s) == (1, 0.0)
