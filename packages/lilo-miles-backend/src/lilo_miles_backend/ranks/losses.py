"""Losses: what each makes of the target logprobs: a sum over tokens, never a mean.

In every formula p is the trainer's logprob of the target, q the input `logprobs` (of the policy that sampled), A the
input `advantages`, r = exp(p - q), sg() stops the gradient. All arithmetic is float64 on tensors of the logprobs'
shape and each token's loss reads that token alone, so that neither depends on how a batch is cut; the gradient with
respect to p comes from autograd (`token_loss.py`).

Clip bounds are the per-token inputs `clip_low_threshold` and `clip_high_threshold` where a datum has them, else the
config values of the same names, which have defaults (`lilo_engine.operations.losses`).

Shapes: C tokens, k targets per position (1 for all but cross_entropy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from lilo_engine.operations.losses import CLIP_INPUTS, DEFAULTS, LOSSES
from lilo_engine.operations.operation import LossConfig

SEQUENCE_LOG_RATIO = "sequence_log_ratio"
"""Input of losses by sequence that no client sends: the log of the row's ratio at each of its tokens, float64 [C, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss reads besides p."""

    tensors: Mapping[str, torch.Tensor]
    """float64 [C, k]."""
    config: Mapping[str, float]
    """Complete: defaults filled in."""


Formula: TypeAlias = Callable[[torch.Tensor, LossInputs], torch.Tensor]
"""From p (float64 [C, k]) and the inputs to the loss of each token, [C, k]."""


def cross_entropy(p: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """-w p, with `weights` w of any sign; 1 where they are missing. Targets may be [n, k]: a sum over k too."""
    weights = inputs.tensors.get("weights")
    return -p if weights is None else -weights * p


def importance_sampling(p: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """-r A: the policy gradient corrected for the sampling policy (Sutton and Barto, 2nd ed., section 5.5)."""
    return -_ratio(p, inputs) * inputs.tensors["advantages"]


def ppo(p: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """-min(r A, clip(r, low, high) A): Schulman et al., arXiv:1707.06347, equation 7."""
    return _clipped_objective(_ratio(p, inputs), inputs)


def cispo(p: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """-sg(clip(r, low, high)) p A: MiniMax-M1, arXiv:2506.13585, equation 4: clips the weight, never the gradient."""
    low, high = _bounds(p, inputs)
    return -_ratio(p, inputs).detach().clamp(low, high) * p * inputs.tensors["advantages"]


def dro(p: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """-(p A - beta / 2 (p - q)^2): Richemond et al., arXiv:2405.19107, with the value folded into A."""
    distance = p - inputs.tensors["logprobs"]
    return -(p * inputs.tensors["advantages"] - 0.5 * inputs.config["beta"] * distance.square())


def gspo(p: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """PPO's objective with one ratio per sequence: GSPO-token, Zheng et al., arXiv:2507.18071, equation 13.

    s = exp(mean of p - q over the tokens where `sequence_ratio_mask` is not 0) is the value of every token's ratio; its
    gradient is the token's own: s_t = sg(s) exp(p_t - sg(p_t)). An empty mask means s = 1. The mean is found before
    (`TokenLoss.set_sequences`), since it needs the whole row.
    """
    sequence = inputs.tensors[SEQUENCE_LOG_RATIO].exp()
    return _clipped_objective(sequence * (p - p.detach()).exp(), inputs)


_FORMULAS: Mapping[str, Formula] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}

_BY_SEQUENCE = frozenset({"gspo"})
"""Losses whose tokens need something of their whole row."""

LOSS_NAMES: tuple[str, ...] = tuple(_FORMULAS)
"""Every loss by the name that clients use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss as one batch asks for it."""

    name: str
    formula: Formula
    config: Mapping[str, float]
    """Complete: defaults filled in."""

    @property
    def by_sequence(self) -> bool:
        """Whether all logprobs of a row must be known before the slope of any: `TokenLoss.set_sequences`."""
        return self.name in _BY_SEQUENCE

    @classmethod
    def of(cls, name: str, given: LossConfig) -> Objective:
        """Look a loss up and complete its settings; the engine has checked both (`lilo_engine.operations.validate`)."""
        assert name in _FORMULAS, f"{name!r} is not one of {LOSS_NAMES}"
        settings = LOSSES[name].config
        assert set(given) <= set(settings), f"{name!r} takes {settings}, not {tuple(given)}"
        assert not any(isinstance(value, str) for value in given.values()), given
        return cls(
            name=name,
            formula=_FORMULAS[name],
            config={key: float(given.get(key, DEFAULTS[key])) for key in settings},
        )


def _ratio(p: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return (p - inputs.tensors["logprobs"]).exp()


def _bounds(p: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = (_bound(name, p, inputs) for name in CLIP_INPUTS)
    return low, high


def _bound(name: str, p: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    given = inputs.tensors.get(name)
    if given is None:
        return p.new_full((), inputs.config[name])  # filled on the device: nothing is copied there
    # NaN marks the rows of a microbatch whose datum left the input out.
    return given.masked_fill(given.isnan(), inputs.config[name])


def _clipped_objective(ratio: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    low, high = _bounds(ratio, inputs)
    advantages = inputs.tensors["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
