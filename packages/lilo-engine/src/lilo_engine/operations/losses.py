"""Losses: which inputs and settings each loss takes. No arithmetic: that is the trainer's.

Names and inputs are those of the public SDK. Every input besides `target_tokens` is float32 and has one value per
position; only cross_entropy may have several targets per position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CLIP_INPUTS = ("clip_low_threshold", "clip_high_threshold")
"""The two settings of the clipped losses; as inputs they give a bound per token."""

DEFAULTS: Mapping[str, float] = MappingProxyType(
    {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05}
)
"""What a setting is when a client leaves it out; those of the public SDK documentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss as a client names it."""

    required: tuple[str, ...]
    """Float inputs that every datum must have, besides `target_tokens`."""
    optional: tuple[str, ...] = ()
    """Float inputs that a datum may have."""
    config: tuple[str, ...] = ()
    """Numeric settings it takes, all optional."""
    many_targets: bool = False
    """Whether `target_tokens` and the other inputs may be [n, k]."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """All float inputs it knows."""
        return (*self.required, *self.optional)


_RATIO = ("logprobs", "advantages")

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross_entropy": Loss(required=(), optional=("weights",), many_targets=True),
        "importance_sampling": Loss(required=_RATIO),
        "ppo": Loss(required=_RATIO, optional=CLIP_INPUTS, config=CLIP_INPUTS),
        "cispo": Loss(required=_RATIO, optional=CLIP_INPUTS, config=CLIP_INPUTS),
        "dro": Loss(required=_RATIO, config=("beta",)),
        "gspo": Loss(
            required=(*_RATIO, "sequence_ratio_mask"), optional=CLIP_INPUTS, config=CLIP_INPUTS
        ),
    }
)
"""Every loss there is, by the client's name for it."""
