"""The losses in float64 and as formulas: what the trainer's `loss:sum` is compared with. Not a proof.

p is the trainer's logprob of a target, q the `logprobs` input, A the advantage, r = exp(p - q); sums over tokens.
"""

from __future__ import annotations

import numpy as np
from tinker.types import LossFnType

CONFIG: dict[LossFnType, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01},
}
"""Every loss, with a configuration under which something is clipped."""


def inputs_of(name: LossFnType, row: list[float]) -> dict[str, list[float]]:
    """Inputs of one datum whose logprobs are `row`: q beside p, advantages of both signs."""
    position = np.arange(len(row))
    if name == "cross_entropy":
        return {"weights": (np.cos(position) + 0.5).tolist()}
    columns = {
        "logprobs": (np.array(row) + 0.3 * np.sin(3 * position)).tolist(),
        "advantages": np.cos(2 * position).tolist(),
    }
    if name == "gspo":
        columns["sequence_ratio_mask"] = (position >= 3).astype(float).tolist()
    return columns


def expected_loss(name: LossFnType, p: np.ndarray, columns: dict[str, list[float]]) -> float:
    """The loss of one datum."""
    config = CONFIG[name]
    given = {
        key: np.array(value, dtype=np.float32).astype(np.float64) for key, value in columns.items()
    }
    if name == "cross_entropy":
        return float(-(given["weights"] * p).sum())
    q, advantage = given["logprobs"], given["advantages"]
    ratio = np.exp(p - q)
    if name == "importance_sampling":
        return float(-(ratio * advantage).sum())
    if name == "dro":
        return float(-(p * advantage - 0.5 * config["beta"] * (p - q) ** 2).sum())
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "cispo":
        return float(-(np.clip(ratio, low, high) * p * advantage).sum())
    if name == "gspo":
        mask = given["sequence_ratio_mask"]
        sequence_ratio = np.exp(((p - q) * mask).sum() / max(mask.sum(), 1.0))
        ratio = np.full_like(p, sequence_ratio)
    return float(-np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage).sum())
