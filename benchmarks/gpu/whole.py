"""Whole models on one GPU: Qwen3-8B's 36 layers at 16k, and Qwen3-0.6B's shape at 128k, each with optimizer."""

from __future__ import annotations

import argparse

from lilo_miles_backend.bench.clock import timed
from lilo_miles_backend.bench.costs import CEILING, useful
from lilo_miles_backend.bench.native import Layout, Trainer, definition, random_datums
from lilo_miles_backend.bench.random_model import SHAPES

from benchmarks.gpu.lines import at_least, bound, emit, part
from benchmarks.gpu.models import model_folder

CASE = "whole"
FLOOR = {"8b": 10_000.0}
"""Tokens a second that must be reached."""


def main() -> None:
    """Each model at its length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--keep", default="all")
    parser.add_argument("runs", nargs="*", default=["8b:16384", "0.6b:131072"], help="MODEL:TOKENS")
    arguments = parser.parse_args()
    for run in arguments.runs:
        model, tokens = run.split(":")
        with part(CASE, f"{model} at {tokens}"):
            measure(arguments.device, model, int(tokens), arguments.keep)


def measure(device: str, model: str, tokens: int, keep: str) -> None:
    """A few steps; the loss must fall, since one sequence is learned by heart."""
    folder, architecture = model_folder(model)
    what = definition(folder, architecture, tokens, Layout(device=device, keep=keep))
    losses: list[float] = []
    with Trainer(what) as trainer:
        (model_id,) = trainer.models
        data = {model_id: random_datums([tokens], architecture.vocab)}

        def step() -> None:
            losses.append(trainer.step(data)[0].metrics["loss:sum"])

        timing = timed(step, warm=2, runs=4, budget_s=20.0)
    speed = useful(architecture, [tokens]) / timing.best_s
    emit(
        CASE,
        setting=f"{model}, {architecture.layers} layers, keep {keep}",
        tokens=tokens,
        tok_s=tokens / timing.best_s,
        peak_gib=timing.peak_gib,
        useful_tflops=speed / 1e12,
        useful_share=speed / CEILING,
        seconds=timing.all_s,
        losses=[round(loss, 4) for loss in losses],
    )
    bound(
        CASE, f"{model}: the loss falls", losses[-1], f"< {losses[0]:.4g}", losses[-1] < losses[0]
    )
    if model in FLOOR and SHAPES[model].layers == architecture.layers:
        at_least(
            CASE, f"{model} at {tokens}: tokens a second", tokens / timing.best_s, FLOOR[model]
        )


if __name__ == "__main__":
    main()
