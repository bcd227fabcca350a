"""`lilo plan`: what a definition, or any model's `config.json`, needs: memory per rank, time and price of a step.

Presentation and the reading of options only; `lilo_definitions.planner` does the arithmetic. Imports nothing heavy: it
answers in a fraction of a second.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer
from lilo_definitions import GPUS, Architecture, ModelConfig, get
from lilo_definitions.gpus import GpuName
from lilo_definitions.lora import TARGET_GROUPS, TargetGroup
from lilo_definitions.model_config import read_config_file
from lilo_definitions.planner import (
    Job,
    Plan,
    TrainerName,
    beside_sampler,
    make_plan,
    nearest_fit,
    ranked_layouts,
    ways_of,
)
from lilo_definitions.planner.chart import svg
from lilo_definitions.trainer import KeepActivations

from lilo_engine.cli.problems import Problem, problems_in_one_line

_LISTED = 8
"""Layouts that a search shows."""
_Count = Annotated[int | None, typer.Option(min=1, show_default=False)]


def plan(
    name: Annotated[
        str, typer.Argument(help="A definition, a YAML file, or a config.json or its folder.")
    ],
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a row, instead of the definition's.", min=1, show_default=False
        ),
    ] = None,
    trainer: Annotated[
        Literal["lilo", "miles"], typer.Option(help="Whose way of computing.")
    ] = "lilo",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    picture: Annotated[
        Path | None, typer.Option("--svg", help="Write the chart to this file.", show_default=False)
    ] = None,
    search: Annotated[bool, typer.Option(help="Rank the layouts of --gpus GPUs.")] = False,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs.", min=1, show_default=False)
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Kind of GPU.", show_default=False)] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.", min=1)] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks.", min=1)] = None,
    keep: Annotated[
        str | None, typer.Option(help="Kept activations: input, attention, qkv, all, auto.")
    ] = None,
    slots: Annotated[int | None, typer.Option(help="Resident adapters.", min=1)] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the adapters.", min=1)] = None,
    rows: Annotated[int | None, typer.Option(help="Full rows of a step.", min=1)] = None,
    usd_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Price, instead of the list price.", min=0.0)
    ] = None,
) -> None:
    """Say what a definition needs before anything is rented: memory per rank, time and price of a step."""
    with problems_in_one_line():
        # A search chooses the layout itself.
        given = None if search else gpus
        changes = _Changes(
            gpus=given, gpu=gpu, tp=tp, cp=cp, keep=keep, slots=slots, rank=lora_rank
        )
        job = changes.applied(_job(name, context), trainer)
        if search:
            found = _search(job, gpus or job.world_size, trainer)
            if as_json:
                print(json.dumps([one.as_json() for one in found], indent=2))
            else:
                from lilo_engine.cli.plan_view import show_layouts

                show_layouts(job, found, gpus or job.world_size)
            return
        if trainer == "miles" and job.gpu is None:
            raise Problem(f"{job.name} runs on CPU, and raw Miles trains on CUDA only")
        made = make_plan(job, trainer, rows=rows, usd_per_gpu_hour=usd_per_gpu_hour)
        if made.refusals:
            raise Problem(
                f"{job.name} would be refused at start: {'; '.join(made.refusals)}; choose another --tp, "
                "let --search find layouts, or plan the raw run with --trainer miles"
            )
        nearest = nearest_fit(job, trainer) if made.fits is False else None
        if picture is not None:
            picture.write_text(svg(made), "utf-8")
        if as_json:
            content = made.as_json()
            content["nearest_fit"] = None if nearest is None else nearest.as_json()
            print(json.dumps(content, indent=2))
        else:
            from lilo_engine.cli.plan_view import show_plan

            show_plan(made, nearest)


class _Changes:
    """What the options change about a job."""

    def __init__(
        self,
        *,
        gpus: int | None,
        gpu: str | None,
        tp: int | None,
        cp: int | None,
        keep: str | None,
        slots: int | None,
        rank: int | None,
    ) -> None:
        self._gpu = _one_of("--gpu", gpu, tuple(GPUS))
        self._keep = _one_of("--keep", keep, get_args(KeepActivations))
        self._gpus, self._tp, self._cp, self._slots, self._rank = gpus, tp, cp, slots, rank

    def applied(self, job: Job, trainer: TrainerName) -> Job:
        """The job with them."""
        if self._gpu is not None:
            job = replace(job, gpu=GPUS[cast(GpuName, self._gpu)])
        if self._keep is not None:
            ways = ways_of(trainer)
            if trainer == "miles" and self._keep not in ways:
                raise Problem(f"--keep is {self._keep!r}; raw Miles keeps {', '.join(ways)} only")
            job = replace(job, keep=self._keep)
        job = replace(job, slots=self._slots or job.slots, lora_rank=self._rank or job.lora_rank)
        if self._gpus is None and self._tp is None and self._cp is None:
            return job
        return self._laid_out(job)

    def _laid_out(self, job: Job) -> Job:
        """Another layout; data-parallel ranks are what is left over of the GPUs."""
        tp, cp = self._tp or job.tp, self._cp or job.cp
        world = self._gpus or (tp * cp * job.dp)
        if world % (tp * cp):
            raise Problem(
                f"--gpus {world} cannot be split into tp {tp} x cp {cp}; choose a multiple of {tp * cp}, "
                "or let --search find layouts"
            )
        _check_splits(job.architecture, tp)
        nodes = -(-world // 8) if job.gpu is not None else 1
        share = -(-job.context // cp)
        return replace(job, tp=tp, cp=cp, dp=world // (tp * cp), nodes=nodes, tokens_per_rank=share)


def _check_splits(model: Architecture, tp: int) -> None:
    """Refuse tensor parallelism that a model cannot be split by; more ranks than key-value heads repeat them."""
    misfits = [
        f"{number} {what}"
        for what, number in (("query heads", model.heads), ("MLP columns", model.inner))
        if number % tp
    ]
    if model.kv_heads % tp and tp % model.kv_heads:
        misfits.append(f"{model.kv_heads} key-value heads")
    if misfits:
        raise Problem(
            f"--tp {tp} does not divide {', '.join(misfits)}; choose another, or let --search find layouts"
        )


def _one_of(option: str, given: str | None, allowed: tuple[str, ...]) -> str | None:
    if given is not None and given not in allowed:
        raise Problem(f"{option} is {given!r}; expected one of {', '.join(allowed)}")
    return given


def _job(name: str, context: int | None) -> Job:
    """A definition's job, or that of a model's configuration on one H200."""
    path = Path(name).expanduser()
    if path.name.endswith(".json"):
        return _job_of_model(path.parent.name or path.stem, read_config_file(path), context)
    if path.is_dir():
        return _job_of_model(path.name, read_config_file(path / "config.json"), context)
    definition = get(name)
    if context is not None and context > definition.model.context:
        raise Problem(
            f"--context is {context}; {definition.model.name} takes at most {definition.model.context} tokens"
        )
    return beside_sampler(Job.of(definition, context=context), definition)


def _job_of_model(name: str, config: ModelConfig, context: int | None) -> Job:
    model = config.architecture()
    length = context or model.context
    if length > model.context:
        raise Problem(f"--context is {length}; the model takes at most {model.context} tokens")
    targets: tuple[TargetGroup, ...] = TARGET_GROUPS
    return Job(
        name=name,
        architecture=model,
        context=length,
        tokens_per_rank=length,
        gpu=GPUS["H200"],
        targets=targets,
    )


def _search(job: Job, num_gpus: int, trainer: Literal["lilo", "miles"]) -> list[Plan]:
    if job.gpu is None:
        raise Problem(
            f"{job.name} runs on CPU; --search ranks layouts of GPUs: name one with --gpu"
        )
    found = ranked_layouts(job, num_gpus, trainer)
    if not found:
        raise Problem(
            f"{job.name} at {job.context} tokens fits no layout of {num_gpus} {job.gpu.name}; try more --gpus"
        )
    return found[:_LISTED]
