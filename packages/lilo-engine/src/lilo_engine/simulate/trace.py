"""Trace: what a simulation writes down while it runs, and the figures made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lilo_engine.operations.operation import ForwardBackward, Operation, OptimStep
from lilo_engine.schedule.lanes import Lane

LOOKS = 100
"""How often progress is looked at, evenly over the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Progress of all clients at one moment, in tokens."""

    time_s: float
    least: int
    median: float
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run came to."""

    clients: int
    operations: int
    plans: int
    simulated_s: float
    progress_ratio: float | None
    """Most to least progress while nobody has finished, from half of the work on; None if somebody had finished
    by then. With few clients those with short requests are held up by their own round trips, not by others."""
    first_end_s: float
    last_end_s: float
    bypass: int
    """The most often that a ready operation was passed over."""
    bypass_bound: int
    """Models there were."""
    fill: float | None
    """Mean share of the token budget in commands that left others waiting which could have joined."""
    wait_s: Mapping[str, Mapping[str, float]]
    """Kind of operation -> percentile -> seconds from its submission to its start."""
    lane_use: Mapping[str, float]
    """Lane -> busy seconds by simulated seconds; above 1 where several run side by side."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Trace:
    """Counts and samples of one run."""

    clients: int
    work_tokens: int
    plans: int = 0
    ended_s: float = 0.0
    looks: list[Look] = field(default_factory=list[Look])
    ends_s: dict[int, float] = field(default_factory=dict[int, float])
    """Client -> when it had done everything."""
    waits_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fills: list[tuple[float, bool]] = field(default_factory=list[tuple[float, bool]])
    """Share of the budget, and whether others were left that could have joined."""
    _progress: list[int] = field(init=False)
    _done_tokens: int = 0
    _bypass: int = 0
    _busy_s: dict[Lane, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        """Nobody has progressed."""
        self._progress = [0] * self.clients

    def waited(self, operation: Operation, wait_s: float) -> None:
        """An operation starts."""
        self.waits_s[_kind(operation)].append(wait_s)

    def served_after(self, passed: int) -> None:
        """An operation that was ready runs, after having been passed over so often."""
        self._bypass = max(self._bypass, passed)

    def busy(self, lane: Lane, took_s: float) -> None:
        """A lane is taken for so long."""
        self._busy_s[lane] += took_s

    def passes(
        self,
        time_s: float,
        served: Sequence[tuple[int, int]],
        *,
        fill: float,
        left_over: bool,
    ) -> None:
        """A command of passes starts: (client, tokens) of each."""
        self.fills.append((fill, left_over))
        for index, tokens in served:
            self._progress[index] += tokens
            self._done_tokens += tokens
        share = self._done_tokens / (self.clients * self.work_tokens)
        if share * LOOKS >= len(self.looks) + 1:
            progress = np.array(self._progress)
            self.looks.append(
                Look(
                    time_s=time_s,
                    least=int(progress.min()),
                    median=float(np.median(progress)),
                    most=int(progress.max()),
                )
            )

    def client_ended(self, index: int, time_s: float) -> None:
        """A client has done all its work."""
        self.ends_s[index] = time_s

    def figures(self) -> Figures:
        """What it came to."""
        return Figures(
            clients=self.clients,
            operations=sum(map(len, self.waits_s.values())),
            plans=self.plans,
            simulated_s=self.ended_s,
            progress_ratio=self._progress_ratio(),
            first_end_s=min(self.ends_s.values()),
            last_end_s=max(self.ends_s.values()),
            bypass=self._bypass,
            bypass_bound=self.clients,
            fill=_mean([fill for fill, left_over in self.fills if left_over]),
            wait_s={kind: _percentiles(waits) for kind, waits in sorted(self.waits_s.items())},
            lane_use={lane: busy / self.ended_s for lane, busy in sorted(self._busy_s.items())},
        )

    def _progress_ratio(self) -> float | None:
        half = self.work_tokens / 2
        counted = [
            look for look in self.looks if look.median >= half and look.most < self.work_tokens
        ]
        return max((look.most / max(look.least, 1) for look in counted), default=None)


def _kind(operation: Operation) -> str:
    match operation:
        case ForwardBackward():
            return "forward_backward"
        case OptimStep():
            return "optim_step"
        case _:
            return "save"


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    points = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    found = np.percentile(values, list(points.values()))
    return {name: float(value) for name, value in zip(points, found, strict=True)}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
