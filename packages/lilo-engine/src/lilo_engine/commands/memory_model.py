"""Memory model: the arithmetic of `MemoryBackend`: sixteen weights, six losses, AdamW. Float64, numpy, deterministic.

    h(i) = (5 x token(i) + 2 x target(i)) mod 16        p(i) = log sigmoid(w[h(i)])

It is no language model, but it has the properties that the engine relies on: logprobs depend on the weights, losses
on the logprobs, gradients add up over passes, and a step depends on all steps before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lilo_engine.operations.datum import Datum
from lilo_engine.operations.losses import CLIP_INPUTS, DEFAULTS
from lilo_engine.operations.operation import AdamParams, LoraSpec, LossConfig

CELLS = 16

Array: TypeAlias = npt.NDArray[np.float64]


def _zeros() -> Array:
    return np.zeros(CELLS)


@dataclass(slots=True, kw_only=True)
class MemoryAdapter:
    """One adapter: weights, moments, and the gradients of the running window, all float64 [CELLS]."""

    spec: LoraSpec
    weights: Array
    exp_avg: Array = field(default_factory=_zeros)
    exp_avg_sq: Array = field(default_factory=_zeros)
    optimizer_step: int = 0
    gradients: Array = field(default_factory=_zeros)

    @classmethod
    def fresh(cls, model_id: str, spec: LoraSpec) -> MemoryAdapter:
        """Initial weights depend on the seed alone; without one, on the model's id."""
        source = f"seed {spec.seed}" if spec.seed is not None else f"model {model_id}"
        digest = hashlib.sha256(source.encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        return cls(spec=spec, weights=generator.normal(scale=0.1, size=CELLS))

    def frozen(self) -> MemoryAdapter:
        """A copy that later training does not change."""
        return replace(
            self,
            weights=self.weights.copy(),
            exp_avg=self.exp_avg.copy(),
            exp_avg_sq=self.exp_avg_sq.copy(),
            gradients=_zeros(),
        )

    def step(self, params: AdamParams) -> dict[str, float]:
        """AdamW (Loshchilov and Hutter 2019) with bias correction and clipping by the global norm."""
        norm = float(np.sqrt(np.sum(self.gradients**2)))
        gradients, self.gradients = self.gradients, _zeros()
        if not np.isfinite(norm):
            return {"grad_norm": norm, "skipped": 1.0}
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            gradients = gradients * (params.grad_clip_norm / norm)
        self.optimizer_step += 1
        self.exp_avg = params.beta1 * self.exp_avg + (1 - params.beta1) * gradients
        self.exp_avg_sq = params.beta2 * self.exp_avg_sq + (1 - params.beta2) * gradients**2
        mean = self.exp_avg / (1 - params.beta1**self.optimizer_step)
        variance = self.exp_avg_sq / (1 - params.beta2**self.optimizer_step)
        decayed = self.weights * (1 - params.learning_rate * params.weight_decay)
        self.weights = decayed - params.learning_rate * mean / (np.sqrt(variance) + params.eps)
        return {"grad_norm": norm, "skipped": 0.0}


def run_datum(
    weights: Array, datum: Datum, loss: str, config: LossConfig
) -> tuple[Array, float, Array]:
    """One datum: logprobs of the shape of its targets, its loss, and the gradient [CELLS] of that loss."""
    targets = datum.loss_inputs["target_tokens"].numpy()
    tokens = datum.tokens.numpy().astype(np.int64)
    tokens = tokens.reshape(tokens.shape + (1,) * (targets.ndim - 1))
    cells = (5 * tokens + 2 * targets) % CELLS
    w = weights[cells]
    p = -np.logaddexp(0.0, -w)
    inputs = {
        name: tensor.numpy().astype(np.float64)
        for name, tensor in datum.loss_inputs.items()
        if name != "target_tokens"
    }
    with np.errstate(over="ignore", invalid="ignore"):
        value, slope = _loss_and_slope(loss, config, p, inputs)
        gradient = np.zeros(CELLS)
        np.add.at(gradient, cells, slope / (1.0 + np.exp(w)))
    return p, value, gradient


def _loss_and_slope(
    loss: str, config: LossConfig, p: Array, inputs: Mapping[str, Array]
) -> tuple[float, Array]:
    """Loss (a sum) and its slope by each p. Formulas: the public SDK documentation of each loss."""
    if loss == "cross_entropy":
        weights = inputs.get("weights", np.ones_like(p))
        return -float(np.sum(weights * p)), -weights
    q, a = inputs["logprobs"], inputs["advantages"]
    if loss == "dro":
        beta = float(config.get("beta", DEFAULTS["beta"]))
        return -float(np.sum(p * a - 0.5 * beta * (p - q) ** 2)), -(a - beta * (p - q))
    if loss == "gspo":
        mask = inputs["sequence_ratio_mask"]
        r: Array = np.full_like(p, np.exp(np.sum(mask * (p - q)) / max(float(mask.sum()), 1.0)))
    else:
        r = np.exp(p - q)
    if loss == "importance_sampling":
        return -float(np.sum(r * a)), -r * a
    clipped = np.clip(r, *_bounds(config, inputs))
    if loss == "cispo":
        return -float(np.sum(clipped * p * a)), -clipped * a
    assert loss in ("ppo", "gspo"), f"loss {loss!r} was let through"
    slope = np.where(r * a <= clipped * a, -r * a, 0.0)
    return -float(np.sum(np.minimum(r * a, clipped * a))), slope


def _bounds(config: LossConfig, inputs: Mapping[str, Array]) -> tuple[Any, Any]:
    """Bounds of the ratio: per token if given so, else of the config, else the defaults."""
    low, high = (inputs.get(name, config.get(name, DEFAULTS[name])) for name in CLIP_INPUTS)
    return low, high
