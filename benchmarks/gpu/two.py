"""Two GPUs of one host, ranks in processes of their own over NCCL: agreement of layouts, then speed.

Agreement: TP2 and CP2 against one rank, from the same published adapter: logprobs, and the first moment after a step,
which is the gradient times 1 - beta1, read back through a published training state. Each layout's moment must have the norm
that its own step told of the gradient, whatever the others have.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, Destination, WorkItem
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.bench.clock import GIB
from lilo_miles_backend.bench.costs import CEILING, useful
from lilo_miles_backend.bench.native import ADAM, Layout, Trainer, definition, random_datums, spec

from benchmarks.gpu.lines import at_least, at_most, emit, part
from benchmarks.gpu.models import model_folder

CASE = "two"
FLOORS = {
    ("cp", 65_536): 20_000.0,
    ("cp", 131_072): 13_000.0,
    ("cp", 262_144): 7_800.0,
    ("tp", 16_384): 35_000.0,
    ("tp", 65_536): 20_000.0,
}
"""Tokens a second and GPU."""
GRADIENTS, LOGPROBS = 0.03, 0.02
"""bf16 on both sides: each is 1.6 % off float32 in gradients and 0.015 in logprobs (`step_exactness.py`)."""
NORMS = 1e-4
"""Between a norm in float64 and that of a float32 buffer that the optimizer made of the same numbers."""
MODEL = ModelId("m0")
Moments: TypeAlias = dict[str, torch.Tensor]
"""The first moment of each factor by name, float64 on the host."""


def main() -> None:
    """Agreement first: speed of wrong numbers is none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", nargs="*", help="tp|cp:TOKENS; none: agreement alone")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    with part(CASE, "agreement"):
        agreement(arguments)
    runs = [f"{a}:{n}" for a, n in FLOORS] if arguments.runs is None else arguments.runs
    for axis in ("tp", "cp"):
        if lengths := [int(run.partition(":")[2]) for run in runs if run.startswith(axis)]:
            with part(CASE, f"{axis}2"):
                speed(arguments, axis, lengths)


@dataclass(frozen=True)
class Found:
    """What a layout made of the same adapter and data."""

    logprobs: np.ndarray
    grad_norm: float
    """As the step told it."""
    state: CheckpointRef


def agreement(arguments: argparse.Namespace) -> None:
    """Layouts share a volume, so each loads what the first one published, and the first reads all results."""
    folder, architecture = model_folder(arguments.model, 2)
    datums = random_datums([1024, 509, 1, 1500], architecture.vocab)
    with tempfile.TemporaryDirectory(prefix="lilo-two-") as volume:

        def start(tp: int, cp: int) -> MilesBackend:
            layout = Layout(device=arguments.device, tp=tp, cp=cp, dtype=arguments.dtype)
            what = definition(folder, architecture, 4096, layout)
            return MilesBackend(BackendConfig(definition=what, checkpoints_root=volume, epoch=1))

        one = start(1, 1)
        one.create_adapter(MODEL, spec(0))
        _randomize(one)
        first = _publish(one, "start", 1)
        found = {"one": _stepped(one, first, datums, "one")}
        for name, tp, cp in (("tp2", 2, 1), ("cp2", 1, 2)):
            with part(CASE, f"agreement of {name}"):
                backend = start(tp, cp)
                try:
                    backend.create_adapter(MODEL, spec(0))
                    found[name] = _stepped(backend, first, datums, name)
                finally:
                    backend.close()
        moments = {name: _moments(one, each.state) for name, each in found.items()}
        one.close()
    for name, each in found.items():
        _check_norm(name, each.grad_norm, moments[name])
    for name in [name for name in found if name != "one"]:
        apart = np.abs(found[name].logprobs - found["one"].logprobs)
        emit(
            CASE,
            setting=f"{name} against one rank: logprobs, largest |d|",
            apart=float(apart.max()),
        )
        at_most(CASE, f"{name} against one rank: logprobs, mean |d|", float(apart.mean()), LOGPROBS)
        _compare(name, moments[name], moments["one"])


def _check_norm(name: str, grad_norm: float, moments: Moments) -> None:
    """Of one layout alone: what the optimizer made of the gradient has the gradient's norm."""
    norm = _flat(moments).norm().item() / (1.0 - ADAM.beta1)
    emit(CASE, setting=f"{name}: norm of the gradient", told=grad_norm, of_moments=norm)
    figure = f"{name}: first moment against the norm of the gradient, relative"
    at_most(CASE, figure, abs(norm / grad_norm - 1.0), NORMS)


def _compare(name: str, ours: Moments, reference: Moments) -> None:
    """All gradients together, and by kind of factor, so that a failure tells where it comes from."""
    kinds = sorted({factor.partition("layers.")[2].partition(".")[2] for factor in reference})
    for kind in ["", *kinds]:
        mine, other = (
            _flat({n: t for n, t in m.items() if n.endswith(kind)}) for m in (ours, reference)
        )
        difference = ((mine - other).norm() / other.norm()).item()
        emit(
            CASE,
            setting=f"{name} against one rank: gradients of {kind or 'all factors'}",
            difference=difference,
            norms=(mine.norm() / other.norm()).item(),
            cosine=torch.nn.functional.cosine_similarity(mine, other, dim=0).item(),
            zeros=[(one == 0).double().mean().item() for one in (mine, other)],
        )
        if not kind:
            figure = f"{name} against one rank: gradients, |d| / |ref|"
            at_most(CASE, figure, difference, GRADIENTS)


def _flat(moments: Moments) -> torch.Tensor:
    return torch.cat([one.reshape(-1) for one in moments.values()])


def _randomize(backend: MilesBackend) -> None:
    adapter = backend.ranks.rank.adapter(MODEL)  # pyright: ignore[reportAttributeAccessIssue] - one rank, in here
    generator = torch.Generator().manual_seed(5)
    for name, factor in adapter.named(adapter.weights).items():
        if name.endswith(".lora_B"):
            factor.copy_(0.01 * torch.randn(factor.shape, generator=generator))


def _publish(backend: MilesBackend, name: str, order: int) -> CheckpointRef:
    capture = backend.capture(MODEL, "training")
    destination = Destination(run_id=MODEL, kind="weights", name=name, order=order, overwrite=False)
    backend.persist(capture, destination)
    return CheckpointRef(run_id=MODEL, kind="weights", name=name)


def _stepped(backend: MilesBackend, start: CheckpointRef, datums: list[Datum], name: str) -> Found:
    backend.load(MODEL, start, with_optimizer=False)
    item = WorkItem(operation_id="op", model_id=MODEL, datums=tuple(datums))
    batch = Batch(loss="cross_entropy", config={}, forward_only=False, items=(item,))
    (output,) = backend.forward_backward(batch)
    assert output.error is None, output.error
    metrics = backend.optim_step(MODEL, ADAM)
    logprobs = np.concatenate([one.numpy().reshape(-1) for one in output.logprobs])
    return Found(logprobs, metrics["grad_norm"], _publish(backend, name, 2))


def _moments(backend: MilesBackend, state: CheckpointRef) -> Moments:
    backend.load(MODEL, state, with_optimizer=True)
    adapter = backend.ranks.rank.adapter(MODEL)  # pyright: ignore[reportAttributeAccessIssue]
    return {name: one.double().cpu() for name, one in adapter.named(adapter.exp_avg).items()}


def speed(arguments: argparse.Namespace, axis: str, lengths: list[int]) -> None:
    """Steps of one row with optimizer, timed in the driver, whose calls return when all ranks have."""
    folder, architecture = model_folder(arguments.model, arguments.layers)
    tp, cp = (2, 1) if axis == "tp" else (1, 2)
    layout = Layout(device=arguments.device, tp=tp, cp=cp)
    with Trainer(definition(folder, architecture, max(lengths), layout)) as trainer:
        for tokens in lengths:
            with part(CASE, f"{axis}2 at {tokens}"):
                data = {trainer.models[0]: random_datums([tokens], architecture.vocab)}
                seconds: list[float] = []
                metrics: dict[str, float] = {}
                for _ in range(2 if tokens > 200_000 else 3 if tokens > 100_000 else 5):
                    started = time.perf_counter()
                    (output,) = trainer.step(data)
                    seconds.append(time.perf_counter() - started)
                    metrics = dict(output.metrics)
                best = min(seconds[1:])
                emit(
                    CASE,
                    setting=f"{axis}2, keep all",
                    tokens=tokens,
                    tok_s=tokens / best / 2,
                    useful_share=useful(architecture, [tokens]) / best / 2 / CEILING,
                    seconds=[round(one, 3) for one in seconds],
                    peak_gib=metrics["peak_memory_bytes:max"] / GIB,
                )
                if (axis, tokens) in FLOORS:
                    figure = f"{axis}2 at {tokens}: tokens a second and GPU"
                    at_least(CASE, figure, tokens / best / 2, FLOORS[axis, tokens])


if __name__ == "__main__":
    main()
