"""AdamW of one adapter: decoupled weight decay, own step count, global-norm clipping, refusal of non-finite gradients.

Works on the adapter's flat buffers, so a step costs the same whatever the number of modules, and touches no other
adapter's numbers. What it computes with is the device's (`kernels.Optimizer`).
"""

from __future__ import annotations

import math

import torch
from lilo_engine.operations.operation import AdamParams

from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.kernels.kernels import Optimizer
from lilo_miles_backend.ranks.kernels.reference import REFERENCE
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.reduction import gradient_norm, sum_gradients
from lilo_miles_backend.ranks.transfer import fetching


def adamw_step(
    adapter: Adapter,
    params: AdamParams,
    parallel: Parallel | None = None,
    kernels: Optimizer = REFERENCE.optimizer,
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
    told = fetching(norm)  # before the step is queued, which then runs while the host goes on
    with torch.no_grad():
        kernels.adamw_(adapter.buffers, params, step=adapter.optimizer_step + 1, norm=norm)
    adapter.num_passes = 0
    value = told.wait()[0].item()
    metrics = {"learning_rate": params.learning_rate, "skipped": 1.0}
    if math.isfinite(value):
        adapter.optimizer_step += 1
        metrics |= {"skipped": 0.0, "grad_norm": value}
    metrics["step"] = float(adapter.optimizer_step)
    return metrics
