"""Many requests of one sample against one request of as many, by clients that take next to no time. Not a proof."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import Any

from lilo_engine.bench.server import cpu_s
from lilo_engine.bench.wire import Wire
from lilo_engine.bench.wire_model import WireModel, WireSampler

SAMPLES = 32
TOKENS = 32
"""Of each sample; every one has exactly as many."""
_ROUNDS = 15


def samples(url: str, pid: int, key: str) -> dict[str, Any]:
    """Wall seconds of both ways of asking, in turns, and the processor time of front and engine for a request.

    Args:
        url: Of a running server.
        pid: Of its front and engine.
        key: Which it takes.
    """
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(url, key)) for _ in range(SAMPLES)]
        sampler = WireModel.create(wires[0]).sampler()
        seeds = count()
        threads = stack.enter_context(ThreadPoolExecutor(SAMPLES))

        def one() -> None:
            sampler.sample(wires[0], samples=SAMPLES, tokens=TOKENS, seed=next(seeds))

        def many() -> None:
            asked = [threads.submit(_single, sampler, wire, next(seeds)) for wire in wires]
            for future in asked:
                future.result()

        one()
        many()
        took: dict[str, list[float]] = {"one request": [], "many requests": []}
        front_ms: list[float] = []
        # In turns, so that whatever else the machine does meets both.
        for _ in range(_ROUNDS):
            took["one request"].append(_wall_s(one))
            before_s = cpu_s(pid)
            took["many requests"].append(_wall_s(many))
            front_ms.append(1e3 * (cpu_s(pid) - before_s) / SAMPLES)
    found = {name: {"p50_ms": 1e3 * statistics.median(walls)} for name, walls in took.items()}
    return {
        **found,
        "many_to_one": found["many requests"]["p50_ms"] / found["one request"]["p50_ms"],
        "front_cpu_ms_per_request": statistics.median(front_ms),
    }


def _single(sampler: WireSampler, wire: Wire, seed: int) -> None:
    sampler.sample(wire, samples=1, tokens=TOKENS, seed=seed)


def _wall_s(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
