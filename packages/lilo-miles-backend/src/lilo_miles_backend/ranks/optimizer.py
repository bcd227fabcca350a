"""AdamW of one adapter: decoupled weight decay, own step count, global-norm clipping, refusal of non-finite gradients.

Works on the adapter's flat buffers, so a step is a dozen operations whatever the number of modules, and touches no
other adapter's numbers.
"""

from __future__ import annotations

import math

import torch
from lilo_engine.operations.operation import AdamParams

from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.reduction import gradient_norm, sum_gradients


def adamw_step(
    adapter: Adapter, params: AdamParams, parallel: Parallel | None = None
) -> dict[str, float]:
    """One step with the adapter's gradients, summed over all ranks; clears them.

    Loshchilov and Hutter, arXiv:1711.05101, algorithm 2 with bias correction (Kingma and Ba, arXiv:1412.6980):
    w -= lr (weight_decay w + m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)). The gradient is scaled down first if
    its norm over all of the adapter's factors, on all ranks, exceeds `grad_clip_norm` (0: never).

    Returns:
        `step` (steps done), `learning_rate`, `skipped`, and `grad_norm` before clipping. A gradient that is not finite
        skips the step: weights, moments and step count stay, `skipped` is 1.0, `grad_norm` is left out.
    """
    sum_gradients(adapter, parallel)
    norm = gradient_norm(adapter, parallel)
    metrics = {"learning_rate": params.learning_rate, "skipped": 0.0}
    if math.isfinite(norm):
        metrics["grad_norm"] = norm
        adapter.optimizer_step += 1
        with torch.no_grad():
            if 0 < params.grad_clip_norm < norm:
                adapter.gradients.mul_(params.grad_clip_norm / norm)
            _update(adapter, params)
    else:
        metrics["skipped"] = 1.0
    adapter.drop_gradients()
    metrics["step"] = float(adapter.optimizer_step)
    return metrics


def _update(adapter: Adapter, params: AdamParams) -> None:
    gradients, step = adapter.gradients, adapter.optimizer_step
    adapter.exp_avg.lerp_(gradients, 1.0 - params.beta1)
    adapter.exp_avg_sq.mul_(params.beta2).addcmul_(gradients, gradients, value=1.0 - params.beta2)
    correction1 = 1.0 - params.beta1**step
    correction2 = 1.0 - params.beta2**step
    # The gradients are cleared after this step, so their buffer holds the denominator.
    denominator = torch.sqrt(adapter.exp_avg_sq, out=gradients)
    denominator.div_(math.sqrt(correction2)).add_(params.eps)
    if params.weight_decay != 0:
        adapter.weights.mul_(1.0 - params.learning_rate * params.weight_decay)
    adapter.weights.addcdiv_(
        adapter.exp_avg, denominator, value=-params.learning_rate / correction1
    )
