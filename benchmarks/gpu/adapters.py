"""Adapters: 1, 4, 8 and 32 adapters in one packed batch, at equal tokens; the pass alone, and with every optimizer."""

from __future__ import annotations

import argparse

from lilo_miles_backend.bench.clock import timed
from lilo_miles_backend.bench.native import Layout, Trainer, definition, random_datums

from benchmarks.gpu.lines import at_least, emit, part
from benchmarks.gpu.models import model_folder

CASE = "adapters"
COUNTS = (1, 4, 8, 32)
ALLOWED = 0.97
"""Of one adapter's speed, with 32."""


def main() -> None:
    """Two rounds over the counts, so that a disturbance hits none of them alone; the best of each counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rows", type=int, default=32)
    arguments = parser.parse_args()
    with part(CASE, f"{max(COUNTS)} adapters"):
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """One backend with all adapters; each count uses the first so many."""
    folder, architecture = model_folder(arguments.model, arguments.layers)
    tokens, rows = arguments.tokens, arguments.rows
    layout = Layout(device=arguments.device, slots=max(COUNTS), packs_models=True)
    datums = random_datums([tokens // rows] * rows, architecture.vocab)
    passes: dict[int, float] = {}
    steps: dict[int, float] = {}
    with Trainer(definition(folder, architecture, tokens, layout), max(COUNTS)) as trainer:
        for round_ in range(2):
            for count in COUNTS:
                used = trainer.models[:count]
                data = {model: datums[index::count] for index, model in enumerate(used)}
                warm = 1 if round_ else 2
                alone = timed(lambda data=data: trainer.run(data), warm=warm, runs=4, budget_s=6.0)
                whole = timed(lambda data=data: trainer.step(data), warm=1, runs=4, budget_s=6.0)
                passes[count] = min(alone.best_s, passes.get(count, alone.best_s))
                steps[count] = min(whole.best_s, steps.get(count, whole.best_s))
                emit(
                    CASE,
                    setting=f"{count} adapters, round {round_}",
                    tokens=tokens,
                    tok_s=tokens / whole.best_s,
                    pass_s=alone.best_s,
                    step_s=whole.best_s,
                    peak_gib=whole.peak_gib,
                )
    most = max(COUNTS)
    if arguments.device == "cpu":
        return  # of a tiny model, where a step is calls and no work
    for what, seconds in (("pass", passes), ("step with its optimizers", steps)):
        at_least(CASE, f"{what}: speed of {most} against 1", seconds[1] / seconds[most], ALLOWED)


if __name__ == "__main__":
    main()
