"""Floating-point operations of one token in LoRA training: frozen linears get no weight gradient.

Forward: 2 per weight. Backward of a frozen linear: as its forward (the gradient of its input); of causal attention: 2.5
times (five products for two); of a delta net: 3 times; of an adapter: twice. Computed again: what is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_definitions.planner.adapters import adapter_parameters
from lilo_definitions.planner.job import Job
from lilo_definitions.trainer import Keep, Levels

_DELTA_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Of one token, by the kind of work, since each runs at its own speed."""

    layers: float
    """Linears of all layers, forward and backward, without recompute."""
    layers_again: float
    """Linears that are computed again."""
    scores_forward: float
    """Softmax attention, forward, and again where its output is not kept."""
    scores_backward: float
    delta: float
    """Delta nets, forward, again and backward."""
    head: float
    """Output layer, forward and backward."""
    adapters: float
    """Forward and backward; inside the rates that were measured with adapters, so no time of their own."""

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.layers
            + self.layers_again
            + self.scores_forward
            + self.scores_backward
            + self.delta
            + self.head
            + self.adapters
        )

    @property
    def useful(self) -> float:
        """What a step needs whatever is kept: nothing twice, and attention's backward counted as two forwards."""
        return self.layers + self.head + self.scores_backward / 2.5 * 3


def flops_of(job: Job, keep: Keep | Levels) -> Flops:
    """Operations of one token in the middle of a row of the job's context.

    Args:
        job: the model and its context.
        keep: what layers keep, all alike or each.
    """
    model = job.architecture
    scores = 2 * model.attention_width * job.context
    delta, soft, line = delta_forward(job), model.softmax_layers, model.linear_layers
    again = _again(job, keep)
    return Flops(
        layers=4 * model.layer_weights,
        layers_again=2 * again.weights,
        scores_forward=scores * (soft + again.softmax),
        scores_backward=2.5 * scores * soft,
        delta=delta * (4 * line + again.linear),
        head=4 * model.head_weights,
        adapters=6 * adapter_parameters(job),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """What is computed a second time."""

    weights: float
    """Matrix elements whose products are; the last product of an MLP never is."""
    softmax: int
    """Layers whose softmax attention is."""
    linear: int
    """Layers whose delta net is."""


def _again(job: Job, keep: Keep | Levels) -> _Again:
    model = job.architecture
    kinds = model.kinds
    levels = keep if isinstance(keep, tuple) else (keep,) * len(kinds)
    weights = 0.0
    for kind, level in zip(kinds, levels, strict=True):
        out = model.hidden * model.attention_width
        whole = model.softmax_weights
        if kind == "linear":
            whole = model.linear_weights
            out = whole - model.hidden * model.linear_in_width
        gate_up = model.mlp_weights * 2 / 3
        weights += {
            "input": gate_up + whole,
            "attention": gate_up + whole - out,
            "qkv": gate_up,
            "all": 0.0,
        }[level]
    from_input = [kind for kind, level in zip(kinds, levels, strict=True) if level == "input"]
    return _Again(
        weights=weights, softmax=from_input.count("softmax"), linear=from_input.count("linear")
    )


def delta_forward(job: Job) -> float:
    """Forward of one delta net in chunk form, with the maps that context parallelism passes on; 0 without any."""
    line, c = job.architecture.linear, _DELTA_CHUNK
    if line is None:
        return 0.0
    k, v = line.key_dim, line.value_dim
    per_head = 2 * c * (3 * k + 2 * v) + 2 * c * c / 3 + 6 * k * v
    if job.cp > 1:
        per_head += 2 * k * k + 2 * k**3 / c
    return line.value_heads * per_head
