"""What `lilo plan` shows a person: a stacked bar of one rank's memory, its parts, time, price, and what else would fit."""

from __future__ import annotations

from collections.abc import Sequence

from lilo_definitions.planner import Job, Plan
from lilo_definitions.planner.chart import PART_COLOURS, PART_WORDS
from lilo_definitions.planner.levels import counted
from rich.console import Console
from rich.table import Table
from rich.text import Text

_BAR = 40
"""Characters of a bar that is as long as the largest value."""
_FULL, _LINE = "\u2588", "\u2500"
"""A full block, and a line for the limit."""
_GB = 1e9


def show_plan(plan: Plan, nearest: Plan | None) -> None:
    """The whole plan."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_headline(plan), soft_wrap=True)
    console.print(_parts(plan))
    console.print(_moments(plan), soft_wrap=True)
    console.print(_ways(plan), soft_wrap=True)
    console.print(_verdict(plan), soft_wrap=True)
    if plan.fits is False:
        console.print(_nearest(nearest), soft_wrap=True)
    console.print(_work(plan))
    for note in plan.notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)


def show_layouts(job: Job, plans: Sequence[Plan], num_gpus: int) -> None:
    """The layouts of a search, fastest first."""
    console = Console(highlight=False, markup=False, emoji=False)
    kind = job.gpu.name if job.gpu else "CPU"
    console.print(f"{job.name} at {job.context:,} tokens on {num_gpus} {kind}, fastest first:")
    table = Table(box=None, pad_edge=False)
    for title in ("nodes", "tp", "cp", "dp"):
        table.add_column(title, justify="right")
    table.add_column("keeps")
    for title in ("GB per rank", "tokens/s per GPU", "USD per M tokens"):
        table.add_column(title, justify="right")
    for plan in plans:
        one, step = plan.job, plan.step
        price = (step.usd or 0.0) / step.tokens * 1e6
        table.add_row(
            *(str(number) for number in (one.nodes, one.tp, one.cp, one.dp)),
            plan.keep,
            f"{plan.memory.peak / _GB:.1f}",
            f"{step.tokens_per_s_per_rank:,.0f}",
            f"{price:.2f}",
        )
    console.print(table)


def _headline(plan: Plan) -> Text:
    job = plan.job
    kind = job.gpu.name if job.gpu else "CPU"
    ranks = "1 rank" if job.world_size == 1 else f"each of {job.world_size} ranks"
    return Text.assemble(
        (job.name, "bold"),
        f": {job.context:,} tokens, {_number(job.architecture.parameters)} parameters, "
        f"{job.slots} adapters of rank {job.lora_rank}; {kind}, nodes {job.nodes}, "
        f"tp {job.tp} x cp {job.cp} x dp {job.dp}; {plan.trainer} trainer, memory of {ranks}:",
    )


def _number(value: int) -> str:
    """As people say a model's size: in billions, or in millions."""
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.2f} M"


def _parts(plan: Plan) -> Table:
    """One bar of the whole, then a line for each part."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, min_width=20)
    table.add_column(justify="right", no_wrap=True, min_width=9)
    table.add_column(no_wrap=True)
    scale = _BAR / max(plan.memory.peak, plan.limit_bytes or 0.0)
    whole = Text()
    for part, value in plan.memory.parts().items():
        whole.append(_FULL * round(value * scale), PART_COLOURS[part])
    table.add_row("peak", f"{plan.memory.peak / _GB:.2f} GB", whole)
    for part, value in plan.memory.parts().items():
        bar = Text(_FULL * round(value * scale), PART_COLOURS[part])
        table.add_row(f"  {PART_WORDS[part]}", f"{value / _GB:.2f} GB", bar)
    if plan.limit_bytes is not None:
        table.add_row(
            "limit",
            f"{plan.limit_bytes / _GB:.2f} GB",
            Text(_LINE * round(plan.limit_bytes * scale), "red"),
        )
    return table


def _moments(plan: Plan) -> str:
    """What comes and goes during the step: the fullest moment is in the bars above."""
    words: list[str] = []
    for moment in plan.moments:
        parts = {"logits": moment.logits, "K and V": moment.kv_gather, "rest": moment.working}
        inside = ", ".join(f"{name} {value / _GB:.2f}" for name, value in parts.items() if value)
        words.append(f"{moment.name} {moment.total / _GB:.2f} GB ({inside})")
    return "moments: " + "; ".join(words)


def _ways(plan: Plan) -> Text:
    """The peak with each way of keeping activations."""
    limit = plan.limit_bytes
    text = Text("keeping ")
    for index, (way, peak) in enumerate(plan.peaks.items()):
        if index:
            text.append(", ")
        style = "bold" if way == plan.keep else ""
        text.append(f"{way} {peak / _GB:.1f} GB", style)
        if limit is not None and peak > limit:
            text.append(" (does not fit)", "red")
    if plan.keep == "auto":
        layers = ", ".join(f"{count} {keep}" for keep, count in counted(plan.levels).items())
        text.append(f"; auto: {layers}", "bold")
    return text


def _verdict(plan: Plan) -> Text:
    if plan.limit_bytes is None:
        return Text(f"needs {plan.memory.peak / _GB:.2f} GB of free memory for each rank")
    spare = (plan.limit_bytes - plan.memory.peak) / _GB
    if plan.fits:
        return Text(f"fits, {spare:.1f} GB to spare", "green")
    return Text(f"does not fit: {-spare:.1f} GB too much", "red")


def _nearest(nearest: Plan | None) -> str:
    if nearest is None:
        return "nothing of up to 128 of these GPUs fits"
    job = nearest.job
    kind = job.gpu.name if job.gpu else "CPU"
    return (
        f"nearest that fits: {job.world_size} {kind} on {job.nodes} nodes, tp {job.tp} x cp {job.cp} x "
        f"dp {job.dp}, keeping {nearest.keep}: {nearest.memory.peak / _GB:.1f} GB"
    )


def _work(plan: Plan) -> Table:
    step, flops = plan.step, plan.flops
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("operations", f"{flops.total / 1e9:,.2f} GFLOP per token")
    share = "" if step.useful_share is None else f", useful share of peak {step.useful_share:.0%}"
    table.add_row(
        "step",
        f"{step.seconds:,.2f} s for {step.rows} rows of {plan.job.context:,} tokens: "
        f"{step.tokens_per_s_per_rank:,.0f} tokens/s per rank{share}",
    )
    table.add_row("rates", _rates(plan))
    if step.usd is not None:
        table.add_row(
            "price",
            f"{step.usd:.4f} USD a step, {step.usd / step.tokens * 1e6:.2f} USD per M tokens",
        )
    table.add_row(
        "checkpoint",
        f"{plan.training_checkpoint_bytes / _GB:.3f} GB training, "
        f"{plan.sampler_checkpoint_bytes / _GB:.3f} GB sampler, per adapter",
    )
    return table


def _rates(plan: Plan) -> str:
    rates = plan.rates
    return (
        f"layers {rates.layers / 1e12:.3g}, head {rates.head / 1e12:.3g}, attention "
        f"{rates.scores_forward / 1e12:.3g} forward and {rates.scores_backward / 1e12:.3g} backward TFLOP/s"
    )
