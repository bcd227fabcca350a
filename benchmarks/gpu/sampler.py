"""Sampler: what `lilo bench sampler` measures, on a random model: ours beside transformers' `generate` and PEFT."""

from __future__ import annotations

import argparse

from lilo_miles_backend.bench.native import Layout, definition
from lilo_miles_backend.bench.sampler import SECTIONS, Workload, measure

from benchmarks.gpu.lines import at_least, emit, part
from benchmarks.gpu.models import model_folder

CASE = "sampler"
COUNTS = (1, 8, 32)


def main() -> None:
    """Every section for itself, so that one which fails leaves the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--long", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with part(CASE, "all sections"):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """One process with both samplers; generating must not be slower than PEFT's."""
    folder, architecture = model_folder(arguments.model, arguments.layers)
    dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    what = definition(
        folder, architecture, arguments.long, Layout(device=arguments.device, dtype=dtype)
    )
    tokens = arguments.tokens
    load = Workload(
        prompt_tokens=tokens,
        new_tokens=tokens,
        long_tokens=arguments.long,
        counts=COUNTS,
        rounds=arguments.rounds,
    )
    report = measure(what, SECTIONS, load)
    emit(CASE, setting="settings", **report["settings"])
    emit(CASE, setting="agreement", **report["agreement"])
    for section in SECTIONS:
        for case, figures in report[section].items():
            emit(CASE, setting=f"{section.replace('_', ' ')}: {case}", **figures)
            if section in ("one_prompt", "many_prompts", "adapters"):
                ratio = figures["ours_against_peft"]
                at_least(CASE, f"{section}, {case}: tokens/s against PEFT's", ratio, 1.0)


if __name__ == "__main__":
    main()
