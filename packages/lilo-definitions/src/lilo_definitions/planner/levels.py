"""Levels: what each layer keeps for its backward, chosen from the memory that is left. Pure arithmetic.

    input -> attention -> qkv -> all        each step of a layer saves time and costs memory

Steps are taken in the order of the time that a byte saves, layer by layer, while the peak stays within the room. The
last layers get the higher levels: their backwards come first, when everybody still keeps what they keep.

Used by plans and by the trainer's ranks, so that both choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lilo_definitions.architecture import Kind
from lilo_definitions.planner import activations
from lilo_definitions.planner.flops import delta_forward
from lilo_definitions.planner.job import Job
from lilo_definitions.planner.moments import Moment, layer_moments, loss_moment
from lilo_definitions.planner.rates import Rates, rates_of
from lilo_definitions.trainer import KEEPS, Keep, Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is held at the fullest moment of a step, activations only."""

    kept: float
    """Bytes that the layers keep at that moment."""
    moment: Moment

    @property
    def total(self) -> float:
        """Bytes."""
        return self.kept + self.moment.total


def choose_levels(job: Job, room_bytes: float | None) -> Levels:
    """The level of each layer.

    Args:
        job: the model, its layout and the tokens of a microbatch on one rank.
        room_bytes: for activations, beside weights and adapters; None: there is no limit.

    Returns:
        Every layer at `input` where even that is over the room: the caller may still try.
    """
    kinds = job.architecture.kinds
    if room_bytes is None or job.gpu is None:
        return ("all",) * len(kinds)
    levels: list[Keep] = ["input"] * len(kinds)
    for kind, level in _steps(job, rates_of(job, "lilo")):
        for index in reversed(range(len(kinds))):
            before = levels[index]
            if kinds[index] != kind or KEEPS.index(before) != KEEPS.index(level) - 1:
                continue
            levels[index] = level
            if fullest_of(job, levels).total > room_bytes:
                levels[index] = before
                break
    return tuple(levels)


def fullest_of(job: Job, levels: Sequence[Keep]) -> Kept:
    """The moment that holds most: the loss, or a block's backward in a layer, those after which have let go."""
    kinds = job.architecture.kinds
    held = activations.inputs_here_bytes(job)
    found: list[Kept] = []
    work = {one: layer_moments(job, *one) for one in set(zip(kinds, levels, strict=True))}
    for one in zip(kinds, levels, strict=True):
        held += activations.layer_bytes(job, *one)
        found += (Kept(kept=held, moment=moment) for moment in work[one])
    found.append(Kept(kept=held, moment=loss_moment(job)))
    return max(found, key=lambda kept: kept.total)


def moments_by_name(job: Job, levels: Levels) -> list[Moment]:
    """Each moment where it holds most, over the layers."""
    found: dict[str, Moment] = {"loss": loss_moment(job)}
    for kind, keep in dict.fromkeys(zip(job.architecture.kinds, levels, strict=True)):
        for moment in layer_moments(job, kind, keep):
            known = found.get(moment.name)
            if known is None or known.total < moment.total:
                found[moment.name] = moment
    return list(found.values())


def counted(levels: Sequence[Keep]) -> Mapping[Keep, int]:
    """Layers at each level that any has."""
    return {keep: levels.count(keep) for keep in KEEPS if keep in levels}


_Step: TypeAlias = tuple[Kind, Keep]
"""A kind of layer, and the level that it comes to."""


def _steps(job: Job, rates: Rates) -> list[_Step]:
    """Every step of every kind of layer, most seconds saved per byte first, a layer's own in their order."""
    waiting: dict[Kind, list[Keep]] = {}
    for kind in job.architecture.kinds:
        waiting[kind] = list(KEEPS[1:])
    steps: list[_Step] = []
    while any(waiting.values()):
        nexts: list[_Step] = [(kind, levels[0]) for kind, levels in waiting.items() if levels]
        kind, level = max(nexts, key=lambda step: _seconds_per_byte(job, rates, *step))
        steps.append((kind, level))
        waiting[kind].remove(level)
    return steps


def _seconds_per_byte(job: Job, rates: Rates, kind: Kind, level: Keep) -> float:
    before = KEEPS[KEEPS.index(level) - 1]
    added = activations.layer_bytes(job, kind, level) - activations.layer_bytes(job, kind, before)
    per_token = added / job.tokens_per_rank * job.tp
    return _seconds_saved(job, rates, kind, level) / per_token


def _seconds_saved(job: Job, rates: Rates, kind: Kind, level: Keep) -> float:
    """Of one token in one layer, on one rank of all its work."""
    model = job.architecture
    if level == "all":
        return 2 * 2 * model.hidden * model.inner / rates.layers
    if kind == "softmax":
        if level == "qkv":
            return 2 * model.hidden * model.qkv_width / rates.layers
        scores = 2 * model.attention_width * job.context / rates.scores_forward
        return 2 * model.hidden * model.attention_width / rates.layers + scores
    line = model.linear
    assert line is not None, "a model without linear layers has no such steps"
    if level == "qkv":
        return 2 * model.hidden * model.linear_in_width / rates.layers
    return 2 * model.hidden * line.value_width / rates.layers + delta_forward(job) / rates.delta
