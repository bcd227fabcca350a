"""Report: what the passes of a batch took, over all ranks, as the metrics of each item.

Measured on every rank and put together once per batch, after its answers have been read: nothing here makes a pass wait.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lilo_definitions.planner.levels import counted

from lilo_miles_backend.ranks.clock import Clock, Point
from lilo_miles_backend.ranks.collectives import stacked
from lilo_miles_backend.ranks.forward_backward import Part, PassSize
from lilo_miles_backend.ranks.levels import LayerLevels
from lilo_miles_backend.ranks.memory import DeviceMemory
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.pass_metrics import PassMetrics
from lilo_miles_backend.ranks.rows import Array
from lilo_miles_backend.ranks.transfer import fetched, sent
from lilo_miles_backend.ranks.work import Work

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanPass:
    """One pass that has been queued on this rank."""

    parts: Sequence[Part]
    size: PassSize
    start: Point
    end: Point


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """Of one pass over all ranks."""

    seconds: float
    microbatches: float
    peak_memory_bytes: float
    padded_tokens: Array
    """Of each part."""


class Report:
    """Measures passes on one rank."""

    def __init__(
        self,
        *,
        device: torch.device,
        parallel: Parallel,
        memory: DeviceMemory,
        levels: LayerLevels,
        work: Work,
        max_tokens: int,
    ) -> None:
        """Measure on this device; `max_tokens` is what a microbatch has room for on one rank."""
        self._device = device
        self._parallel = parallel
        self._clock = Clock(device)
        self._memory = memory
        self._levels = levels
        self._work = work
        self._max_tokens = max_tokens

    def begin(self) -> None:
        """A batch starts."""
        self._memory.begin()

    def now(self) -> Point:
        """Before or after a pass."""
        return self._clock.now()

    def metrics(
        self, passes: Sequence[RanPass], losses: Sequence[float], *, forward_only: bool
    ) -> dict[int, Mapping[str, float]]:
        """By item; all ranks call this together, after the answers of the batch were read."""
        named: dict[int, Mapping[str, float]] = {}
        self._log_peak(passes, forward_only=forward_only)
        for one, totals in zip(passes, self._over_ranks(passes), strict=True):
            lengths = [[row.length for row in part.rows] for part in one.parts]
            total = sum(map(sum, lengths))
            for part, mine, padded in zip(one.parts, lengths, totals.padded_tokens, strict=True):
                named[part.item] = PassMetrics(
                    loss=losses[part.item],
                    tokens=sum(mine),
                    padded_tokens=float(padded),
                    seconds=totals.seconds * sum(mine) / total,
                    flops=self._work.flops(
                        mine, backward=not forward_only, decoder=part.adapter.trains_decoder
                    ),
                    ranks=self._parallel.world_size,
                    peak_flops_per_s=self._memory.peak_flops_per_s,
                    peak_memory_bytes=totals.peak_memory_bytes,
                    fill=total / (totals.microbatches * self._max_tokens),
                ).named()
        return named

    def _log_peak(self, passes: Sequence[RanPass], *, forward_only: bool) -> None:
        """What this rank held at most, beside what was planned for its longest microbatch."""
        longest = max((one.size.longest_tokens for one in passes), default=0)
        planned = self._levels.planned_bytes(longest) if longest else None
        if planned is None:
            return
        measured = self._memory.peak_bytes()
        if forward_only:
            _log.debug("forward of up to %d tokens at once: peak %.2f GB", longest, measured / 1e9)
            return
        layers = counted(self._levels.of(longest))
        _log.info(
            "pass of up to %d tokens at once: peak %.2f GB, planned %.2f GB (%+.1f %%); layers keep %s",
            longest,
            measured / 1e9,
            planned / 1e9,
            100 * (planned / measured - 1),
            ", ".join(f"{keep}: {count}" for keep, count in layers.items()),
        )

    def _over_ranks(self, passes: Sequence[RanPass]) -> Iterator[_Totals]:
        """Sums over the ranks that share rows, the most of all where it is not a share."""
        if not passes:
            return
        here = np.concatenate([self._numbers(one) for one in passes])
        ranks = self._everywhere(here)
        # Tensor-parallel neighbours, next to each other, ran the same rows.
        summed, most = ranks[:: self._parallel.tp.size].sum(0), ranks.max(0)
        place = 0
        for one in passes:
            padded = slice(place + 3, place + 3 + len(one.parts))
            yield _Totals(
                seconds=float(most[place]),
                microbatches=float(summed[place + 1]),
                peak_memory_bytes=float(most[place + 2]),
                padded_tokens=summed[padded],
            )
            place = padded.stop

    def _everywhere(self, here: Array) -> Array:
        """Every rank's numbers in rank order."""
        world = self._parallel.world
        if not world.is_split:
            return here[None]
        (everywhere,) = fetched(stacked(sent(here, self._device), world))
        return everywhere.numpy()

    def _numbers(self, one: RanPass) -> Array:
        seconds = self._clock.seconds(one.start, one.end)
        peak = self._memory.peak_bytes()
        return np.array([seconds, one.size.microbatches, peak, *one.size.padded_tokens], np.float64)
