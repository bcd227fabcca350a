"""Turns: what several methods of doing one thing take, one after the other in turn; the best turn of each counts.

So a disturbance hits none of them alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lilo_miles_backend.bench.clock import synchronize


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The least of some turns."""

    wall_s: float
    cpu_s: float
    """Of all threads of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way of doing it."""

    run: Callable[[], object]
    undo: Callable[[], object] = lambda: None
    """Called after every run, outside of what is timed."""


def take_turns(methods: Mapping[str, Method], rounds: int) -> dict[str, Spent]:
    """Run each once to warm caches up, then `rounds` times.

    Args:
        methods: by name.
        rounds: turns of each that count.
    """
    best: dict[str, Spent] = {}
    for turn in range(rounds + 1):
        for name, method in methods.items():
            spent = _spent(method)
            if turn == 0:
                continue
            last = best.get(name, spent)
            best[name] = Spent(
                wall_s=min(last.wall_s, spent.wall_s), cpu_s=min(last.cpu_s, spent.cpu_s)
            )
    return best


def _spent(method: Method) -> Spent:
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    method.run()
    synchronize()
    spent = Spent(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
    method.undo()
    return spent
