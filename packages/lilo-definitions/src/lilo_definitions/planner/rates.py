"""Rates: operations a second by kind of work, measured on H200, not peaks.

What a layer's products reach with norms, adapters and elementwise work included. Another GPU's are scaled by its data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lilo_definitions.planner.job import Job, TrainerName


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Operations a second of one GPU, by kind of work."""

    layers: float
    head: float
    scores_forward: float
    scores_backward: float
    delta: float


_LAYERS, _HEAD = 510e12, 645e12
_DELTA = 40e12
"""Not measured: 0.015 s of a 27B layer's 32k tokens a rank at TP2, an estimate."""
_ATTENTION: Mapping[int, tuple[float, float]] = MappingProxyType(
    {128: (612e12, 612e12), 256: (690e12, 370e12)}
)
"""Forward and backward by head size; the backward at 256 is bound by registers in every kernel there is."""
_MILES = 340e12
"""Of all work with full recompute: 17.4 s a pass of 250,400 tokens over 16 H200 in the published run."""
_CPU = 80e9
"""One thread, float32, adapters counted: 64, 89 and 98 measured with 0.8M, 11M and 59M parameters on one server core;
differs by machine."""


def rates_of(job: Job, trainer: TrainerName) -> Rates:
    """The rates of one rank of this job."""
    if job.gpu is None:
        return Rates(layers=_CPU, head=_CPU, scores_forward=_CPU, scores_backward=_CPU, delta=_CPU)
    if trainer == "miles":
        return _scaled(_MILES, _MILES, _MILES, _MILES, _MILES, speed=job.gpu.speed)
    forward, backward = _ATTENTION[128 if job.architecture.head_dim <= 128 else 256]
    return _scaled(_LAYERS, _HEAD, forward, backward, _DELTA, speed=job.gpu.speed)


def _scaled(
    layers: float, head: float, forward: float, backward: float, delta: float, *, speed: float
) -> Rates:
    return Rates(
        layers=layers * speed,
        head=head * speed,
        scores_forward=forward * speed,
        scores_backward=backward * speed,
        delta=delta * speed,
    )
