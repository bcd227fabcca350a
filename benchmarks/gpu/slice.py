"""Slice: 8 layers of Qwen3-8B's shape and its head, one sequence a step, with optimizer: what keeps, what it costs.

A backend for each level of what layers keep: `all` is the fast setting, `input` the lean one.
"""

from __future__ import annotations

import argparse

from benchmarks.gpu.clock import timed
from benchmarks.gpu.costs import CEILING, useful
from benchmarks.gpu.lines import emit, part
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.ours import Layout, Trainer, definition, random_datums

CASE = "slice"
PLAN = {"all": (4096, 16384, 65536, 131072), "attention": (16384, 65536), "input": (16384, 65536)}


def main() -> None:
    """Every level at its lengths."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keep", nargs="*", default=list(PLAN))
    parser.add_argument("--lengths", nargs="*", type=int)
    arguments = parser.parse_args()
    for keep in arguments.keep:
        with part(CASE, f"keep {keep}"):
            lengths = arguments.lengths or PLAN[keep]
            measure(arguments.device, arguments.model, arguments.layers, keep, lengths)


def measure(device: str, model: str, layers: int, keep: str, lengths: list[int]) -> None:
    """One backend, every length."""
    folder, architecture = model_folder(model, layers)
    what = definition(folder, architecture, max(lengths), Layout(device=device, keep=keep))
    with Trainer(what) as trainer:
        (model_id,) = trainer.models
        for tokens in lengths:
            with part(CASE, f"keep {keep}, {tokens} tokens"):
                data = {model_id: random_datums([tokens], architecture.vocab)}
                few = tokens > 100_000
                timing = timed(
                    lambda data=data: trainer.step(data),
                    warm=1 if few else 2,
                    runs=2 if few else 6,
                    budget_s=12.0,
                )
                speed = useful(architecture, [tokens]) / timing.best_s
                emit(
                    CASE,
                    setting=f"ours, keep {keep}",
                    keep=keep,
                    tokens=tokens,
                    tok_s=tokens / timing.best_s,
                    tok_s_median=tokens / timing.median_s,
                    peak_gib=timing.peak_gib,
                    useful_tflops=speed / 1e12,
                    useful_share=speed / CEILING,
                    seconds=timing.all_s,
                )


if __name__ == "__main__":
    main()
