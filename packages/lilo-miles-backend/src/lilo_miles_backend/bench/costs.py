"""Costs: useful floating-point operations of a step, counted the same for every trainer that is timed.

Useful: 4 per weight and token of frozen linears and the head (forward, and backward to the input), three times causal
attention's forward of 2 n^2 d a head, no credit for what is computed again. Adapters are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from lilo_definitions.architecture import Architecture

CEILING = 790e12
"""bf16 operations a second of a large product of random numbers on one H200, measured."""


def useful(architecture: Architecture, lengths: Sequence[int]) -> float:
    """Operations of one forward and backward over rows of these lengths; a delta net's own recurrence is left out."""
    weights = architecture.layer_weights + architecture.head_weights
    scores = sum(2 * length * length for length in lengths) * architecture.attention_width
    return 4 * weights * sum(lengths) + 3 * scores * architecture.softmax_layers
