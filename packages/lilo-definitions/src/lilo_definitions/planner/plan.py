"""Plan: everything about one job: memory with each way of keeping activations, time, price, sizes of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lilo_definitions.planner.activations import inputs_away_bytes
from lilo_definitions.planner.adapters import adapter_parameters
from lilo_definitions.planner.flops import Flops, flops_of
from lilo_definitions.planner.job import Job, TrainerName
from lilo_definitions.planner.levels import choose_levels, counted
from lilo_definitions.planner.memory import (
    Memory,
    held_bytes,
    limit_bytes,
    memory_of,
    moments_of,
)
from lilo_definitions.planner.moments import Moment
from lilo_definitions.planner.rates import Rates, rates_of
from lilo_definitions.planner.speed import Step, step_of
from lilo_definitions.planner.traffic import Traffic, traffic_of
from lilo_definitions.trainer import KEEPS, Keep, KeepActivations, Levels

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a job needs."""

    job: Job
    trainer: TrainerName
    keep: KeepActivations
    """What layers keep in this plan."""
    levels: Levels
    """The same of each layer."""
    memory: Memory
    """Of each rank."""
    moments: tuple[Moment, ...]
    """What each moment of the step holds beyond what is held throughout; the fullest makes the peak."""
    limit_bytes: float | None
    """What a rank may allocate; None on CPU."""
    peaks: Mapping[Keep, float]
    """Peak in bytes with each way of keeping activations."""
    adapter_parameters: int
    """Of one adapter."""
    flops: Flops
    rates: Rates
    traffic: Traffic
    """Of one row on one rank."""
    step: Step
    notes: tuple[str, ...]
    """What a reader should know before trusting the numbers."""
    refusals: tuple[str, ...]
    """Why Lilo's trainer would refuse this layout at start, in its words; it is planned nevertheless."""

    @property
    def fits(self) -> bool | None:
        """Whether the peak is under the limit; None where there is none."""
        return None if self.limit_bytes is None else self.memory.peak <= self.limit_bytes

    @property
    def training_checkpoint_bytes(self) -> int:
        """Of one adapter: float32 weights and two moments."""
        return 12 * self.adapter_parameters

    @property
    def sampler_checkpoint_bytes(self) -> int:
        """Of one adapter: float32 weights."""
        return 4 * self.adapter_parameters

    def as_json(self) -> dict[str, object]:
        """For programs; `peak_allocated_gb` is the fullest rank's peak in 10^9 bytes."""
        job, model = self.job, self.job.architecture
        limit = self.limit_bytes
        return {
            "name": job.name,
            "trainer": self.trainer,
            "peak_allocated_gb": round(self.memory.peak / _GB, 3),
            "limit_gb": None if limit is None else round(limit / _GB, 3),
            "fits": self.fits,
            "context": job.context,
            "tokens_per_rank": job.tokens_per_rank,
            "layout": {
                "gpu": job.gpu.name if job.gpu else None,
                "nodes": job.nodes,
                "ranks": job.world_size,
                "tp": job.tp,
                "cp": job.cp,
                "dp": job.dp,
            },
            "keep_activations": self.keep,
            "layers_by_keep": counted(self.levels),
            "memory_gb": {k: round(v / _GB, 4) for k, v in self.memory.parts().items()},
            "moments_gb": {
                moment.name: {
                    "kv_gather": round(moment.kv_gather / _GB, 4),
                    "logits": round(moment.logits / _GB, 4),
                    "working": round(moment.working / _GB, 4),
                }
                for moment in self.moments
            },
            "peak_gb_by_keep": {k: round(v / _GB, 3) for k, v in self.peaks.items()},
            "parameters": model.parameters,
            "adapter_parameters": self.adapter_parameters,
            "flops_per_token": {**asdict(self.flops), "total": self.flops.total},
            "rates_flops_per_s": asdict(self.rates),
            "traffic_gb_per_row": {k: v / _GB for k, v in asdict(self.traffic).items()},
            "step": asdict(self.step),
            "checkpoint_gb": {
                "training": round(self.training_checkpoint_bytes / _GB, 4),
                "sampler": round(self.sampler_checkpoint_bytes / _GB, 4),
            },
            "notes": list(self.notes),
            "refusals": list(self.refusals),
        }


def make_plan(
    job: Job,
    trainer: TrainerName = "lilo",
    *,
    rows: int | None = None,
    usd_per_gpu_hour: float | None = None,
) -> Plan:
    """Plan a job.

    Args:
        job: what is planned.
        trainer: lilo, or the matched raw-Miles run.
        rows: full rows of a step; None: one per data-parallel rank.
        usd_per_gpu_hour: instead of the list price.
    """
    ways = ways_of(trainer)
    keep: KeepActivations = job.keep if job.keep in (*ways, "auto") else ways[0]
    layers = job.architecture.layers
    if keep == "auto" and len(ways) == 1:
        keep = ways[0]
    how = levels_of(job) if keep == "auto" else keep
    return Plan(
        job=job,
        trainer=trainer,
        keep=keep,
        levels=how if isinstance(how, tuple) else (how,) * layers,
        memory=memory_of(job, trainer, how),
        moments=tuple(moments_of(job, trainer, how)),
        limit_bytes=limit_bytes(job),
        peaks={way: memory_of(job, trainer, way).peak for way in ways},
        adapter_parameters=adapter_parameters(job),
        flops=flops_of(job, how),
        rates=rates_of(job, trainer),
        traffic=traffic_of(job, how),
        step=step_of(job, trainer, how, rows=rows, usd_per_gpu_hour=usd_per_gpu_hour),
        notes=tuple(_notes(job, trainer)),
        refusals=() if trainer == "miles" else job.architecture.undivided(job.tp),
    )


def levels_of(job: Job) -> Levels:
    """What `auto` gives each layer of this job, whatever the job says."""
    limit = limit_bytes(job)
    return choose_levels(job, None if limit is None else limit - held_bytes(job))


def ways_of(trainer: TrainerName) -> tuple[Keep, ...]:
    """What layers can keep: the miles run recomputes everything."""
    return ("input",) if trainer == "miles" else KEEPS


def _notes(job: Job, trainer: TrainerName) -> list[str]:
    notes: list[str] = []
    if job.tp > job.architecture.kv_heads:
        notes.append(
            f"tp {job.tp} is over {job.architecture.kv_heads} key-value heads: each is held by "
            f"{job.tp // job.architecture.kv_heads} ranks"
        )
    if job.architecture.linear is not None and trainer == "lilo":
        notes.append(
            "the delta nets' working memory and speed are computed from their shapes, not measured on GPUs"
        )
    if job.offload_inputs and trainer == "lilo":
        away = inputs_away_bytes(job) / _GB
        notes.append(
            f"inputs of layers wait in pinned memory of the host: {away:.1f} GB for each rank; the time of the "
            "copies is not counted"
        )
    if job.gpu is not None and job.gpu.name != "H200":
        notes.append(f"rates are of an H200, scaled to {job.gpu.name} by data sheet")
    return notes
