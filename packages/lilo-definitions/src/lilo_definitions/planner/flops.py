"""Floating-point operations of one token in LoRA training: frozen linears get no weight gradient.

Forward: 2 per weight. Backward of a frozen linear: as its forward (the gradient of its input); of causal attention: 2.5
times (five products for two); of a delta net: 3 times; of an adapter: twice. Computed again: what is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_definitions.planner.adapters import adapter_parameters
from lilo_definitions.planner.job import Job
from lilo_definitions.trainer import Keep

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


def flops_of(job: Job, keep: Keep) -> Flops:
    """Operations of one token in the middle of a row of the job's context."""
    model = job.architecture
    linears = 2 * model.layer_weights
    scores = model.softmax_layers * 2 * model.attention_width * job.context
    delta = _delta(job)
    again = keep == "input"
    return Flops(
        layers=2 * linears,
        layers_again=2 * _weights_again(job, keep),
        scores_forward=scores * (2 if again else 1),
        scores_backward=2.5 * scores,
        delta=delta * (4 if keep == "all" else 5),
        head=4 * model.head_weights,
        adapters=6 * adapter_parameters(job),
    )


def _weights_again(job: Job, keep: Keep) -> float:
    """Matrix elements whose products are computed again; the last product of an MLP never is."""
    model = job.architecture
    gate_up = model.layers * model.mlp_weights * 2 / 3
    outputs = model.softmax_layers * model.hidden * model.attention_width
    if model.linear is not None:
        outputs += model.linear_layers * model.hidden * model.linear.value_width
    projections = model.layer_weights - model.layers * model.mlp_weights - outputs
    return {
        "input": gate_up + projections + outputs,
        "attention": gate_up + projections,
        "qkv": gate_up,
        "all": 0.0,
    }[keep]


def _delta(job: Job) -> float:
    """Forward of all delta nets in chunk form, with the maps that context parallelism passes on."""
    model = job.architecture
    if model.linear is None:
        return 0.0
    line, c = model.linear, _DELTA_CHUNK
    k, v = line.key_dim, line.value_dim
    per_head = 2 * c * (3 * k + 2 * v) + 2 * c * c / 3 + 6 * k * v
    if job.cp > 1:
        per_head += 2 * k * k + 2 * k**3 / c
    return model.linear_layers * line.value_heads * per_head
