"""Costs: useful floating-point operations of a step, counted the same for every trainer that is timed: as `Work` counts."""

from __future__ import annotations

from collections.abc import Sequence

from lilo_definitions.architecture import Architecture

from lilo_miles_backend.ranks.work import Work

CEILING = 790e12
"""bf16 operations a second of a large product of random numbers on one H200, measured."""


def useful(architecture: Architecture, lengths: Sequence[int]) -> float:
    """Operations of one forward and backward over rows of these lengths."""
    return Work.of(architecture).flops(lengths, backward=True, decoder=True)
