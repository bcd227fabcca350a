"""Parameters of adapters: one A and one B per Hugging Face linear, whole and on one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lilo_definitions.lora import TargetGroup
from lilo_definitions.planner.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLinear:
    """A kind of linear that may carry an adapter, and how often the model has it."""

    group: TargetGroup
    count: int
    features_in: int
    features_out: int
    split: Literal["columns", "rows"]
    """What tensor parallelism shards: the output (B is shared out, A whole) or the input (A shared out, B whole)."""
    shards: int
    """Ranks that it is shared out over."""

    def parameters(self, lora_rank: int) -> int:
        """Of one adapter on all of them."""
        return self.count * lora_rank * (self.features_in + self.features_out)

    def parameters_on_a_rank(self, lora_rank: int) -> float:
        """The same, what one rank holds."""
        if self.split == "columns":
            width = self.features_in + self.features_out / self.shards
        else:
            width = self.features_in / self.shards + self.features_out
        return self.count * lora_rank * width


def adapted_linears(job: Job) -> Iterator[AdaptedLinear]:
    """Every kind of linear in the job's target groups."""
    return (linear for linear in _all_linears(job) if linear.group in job.targets)


def _all_linears(job: Job) -> Iterator[AdaptedLinear]:
    model = job.architecture
    query_width = model.attention_width * (2 if model.output_gate else 1)
    soft, layers, hidden = model.softmax_layers, model.layers, model.hidden
    yield _columns("attn", soft, hidden, query_width, job.tp)
    yield _columns("attn", 2 * soft, hidden, model.kv_width, job.kv_shards)
    yield _rows("attn", soft, model.attention_width, hidden, job.tp)
    if model.linear is not None:
        # in_proj_b and in_proj_a (a few rows each) carry none: sampling engines drop them.
        lines, line = model.linear_layers, model.linear
        yield _columns("attn", lines, hidden, line.conv_channels, job.tp)
        yield _columns("attn", lines, hidden, line.value_width, job.tp)
        yield _rows("attn", lines, line.value_width, hidden, job.tp)
    yield _columns("mlp", 2 * layers, hidden, model.inner, job.tp)
    yield _rows("mlp", layers, model.inner, hidden, job.tp)
    yield _columns("unembed", 1, hidden, model.vocab, job.tp)


def _columns(
    group: TargetGroup, count: int, features_in: int, features_out: int, shards: int
) -> AdaptedLinear:
    return AdaptedLinear(
        group=group,
        count=count,
        features_in=features_in,
        features_out=features_out,
        split="columns",
        shards=shards,
    )


def _rows(
    group: TargetGroup, count: int, features_in: int, features_out: int, shards: int
) -> AdaptedLinear:
    return AdaptedLinear(
        group=group,
        count=count,
        features_in=features_in,
        features_out=features_out,
        split="rows",
        shards=shards,
    )


def adapter_parameters(job: Job) -> int:
    """Parameters of one adapter of the job's rank."""
    return sum(linear.parameters(job.lora_rank) for linear in adapted_linears(job))


def adapter_parameters_on_a_rank(job: Job) -> float:
    """Of one adapter, what one rank holds."""
    return sum(linear.parameters_on_a_rank(job.lora_rank) for linear in adapted_linears(job))
