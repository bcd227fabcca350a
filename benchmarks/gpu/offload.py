"""Offload: layers' inputs in the host's memory against inputs on the GPU: speed, peak, and that a pass has the same gradients.

Both ways in one trainer, on the same weights, which have been trained a little so that every factor has a gradient. What
a race between copies and kernels would spoil is the gradients, so they are held against those of the pass without copies;
beside them stands how far that pass is from itself, since attention's backward adds up in any order.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import ModelId
from lilo_miles_backend.bench.clock import timed
from lilo_miles_backend.bench.native import Layout, Trainer, definition, random_datums

from benchmarks.gpu.lines import at_most, bound, emit, part
from benchmarks.gpu.models import model_folder

CASE = "offload"
PLAN = {"input": (16_384, 65_536), "all": (16_384,)}
AGAIN = 1.25
"""|d| / |ref| of all gradients, over that of a repeated pass."""


def main() -> None:
    """Each level at its lengths."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", nargs="*", type=int)
    given = parser.parse_args()
    folder, architecture = model_folder(given.model, given.layers)
    for keep, planned in PLAN.items():
        lengths = given.lengths or planned
        layout = Layout(device=given.device, keep=keep)
        what = definition(folder, architecture, max(lengths), layout)
        with (
            part(CASE, f"keep {keep}"),
            Trainer(what.derive(trainer={"offload_inputs": True})) as trainer,
        ):
            for tokens in lengths:
                data = {trainer.models[0]: random_datums([tokens], architecture.vocab)}
                compare(trainer, data, f"keep {keep}", tokens)


def compare(
    trainer: Trainer, data: Mapping[ModelId, Sequence[Datum]], setting: str, tokens: int
) -> None:
    """Speed and peak of both ways, then the gradients of one pass."""
    ranks: Any = trainer.backend.ranks  # in this process, with one rank
    running = ranks.rank._model._running
    away = running.inputs
    found = {}
    for where, inputs in (("on the GPU", None), ("away", away)):
        running.inputs = inputs
        timing = timed(lambda: trainer.step(data), warm=2, runs=4, budget_s=8.0)
        found[where] = timing
        emit(
            CASE,
            setting=f"{setting}, inputs {where}",
            tokens=tokens,
            tok_s=tokens / timing.best_s,
            peak_gib=timing.peak_gib,
        )
    here, there = found["on the GPU"], found["away"]
    emit(
        CASE,
        setting=f"{setting}, away over on the GPU",
        tokens=tokens,
        speed=here.best_s / there.best_s,
    )
    if trainer.definition.topology.device == "cuda":
        figure = f"{setting} at {tokens}: GiB with inputs away"
        bound(
            CASE,
            figure,
            there.peak_gib,
            f"< {here.peak_gib:.4g}",
            there.peak_gib < here.peak_gib,
        )
    running.inputs = None
    reference, again = (gradients(trainer, data) for _ in range(2))
    running.inputs = away
    spread = relative(again, reference)
    emit(
        CASE,
        setting=f"{setting}, the same pass again on the GPU",
        tokens=tokens,
        difference=spread,
    )
    for attempt in range(2):
        figure = f"{setting} at {tokens}: gradients with inputs away, |d| / |ref|, pass {attempt}"
        at_most(CASE, figure, relative(gradients(trainer, data), reference), AGAIN * spread)


def gradients(trainer: Trainer, data: Mapping[ModelId, Sequence[Datum]]) -> torch.Tensor:
    """Of one pass, on the weights as they are."""
    trainer.run(data)
    ranks: Any = trainer.backend.ranks
    (model_id,) = data
    found = ranks.rank.adapter(model_id).gradients.double().cpu()
    trainer.backend.drop_gradients(model_id)
    return found


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """|d| / |ref|."""
    return float((ours - reference).norm() / reference.norm())


if __name__ == "__main__":
    main()
