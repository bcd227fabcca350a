"""Workload: what synthetic clients do, drawn from a seed. Pure data; `simulation.py` plays it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, TypeAlias

Save: TypeAlias = Literal["checkpoint", "publication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Many clients with equal work, cut into requests of different lengths."""

    clients: int
    work_tokens: int = 65536
    """Tokens that each client trains on, the same for all."""
    shortest_tokens: int = 128
    longest_tokens: int = 2048
    """Each client has a length of its own between these, drawn evenly on a logarithmic scale; its requests vary by
    half of that either way."""
    passes_per_step: int = 2
    """Requests between two optimizer steps, sent together with the step."""
    publishing_share: float = 0.25
    """Clients that publish a sampler snapshot once, at a random step."""
    saving_share: float = 0.02
    """Clients that save a training checkpoint once, at a random step."""
    round_trip_s: float = 0.02
    """From the end of a client's step to its next submission."""
    arrival_s: float = 1.0
    """Clients come one by one within this time."""
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a client submits at once: passes, an optimizer step, perhaps a save."""

    passes: tuple[int, ...]
    """Tokens of each."""
    save: Save | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """All that one client does."""

    starts_s: float
    steps: tuple[Step, ...]


def scripts(workload: Workload) -> list[Script]:
    """One script per client; equal for equal workloads."""
    chance = random.Random(workload.seed)
    return [_script(workload, chance, index) for index in range(workload.clients)]


def _script(workload: Workload, chance: random.Random, index: int) -> Script:
    low, high = math.log(workload.shortest_tokens), math.log(workload.longest_tokens)
    typical = math.exp(chance.uniform(low, high))
    lengths: list[int] = []
    left = workload.work_tokens
    while left:
        drawn = round(typical * chance.uniform(0.5, 1.5))
        length = min(left, max(workload.shortest_tokens, min(drawn, workload.longest_tokens)))
        lengths.append(length)
        left -= length
    count = workload.passes_per_step
    steps = [Step(passes=tuple(lengths[i : i + count])) for i in range(0, len(lengths), count)]
    for share, lane in _shares(workload):
        if chance.random() < share:
            at = chance.randrange(len(steps))
            steps[at] = Step(passes=steps[at].passes, save=lane)
    starts_s = workload.arrival_s * index / workload.clients
    return Script(starts_s=starts_s, steps=tuple(steps))


def _shares(workload: Workload) -> tuple[tuple[float, Save], tuple[float, Save]]:
    return (workload.publishing_share, "publication"), (workload.saving_share, "checkpoint")
