"""The planner against measured truth: published GPU figures (`_measured.py`), CPU runs made now, transformers' counts.

Peaks on the CPU are torch's own accounting of every allocation, from before the trainer is built to after its
optimizer step: the resident size of a process would measure the allocator's habits instead.
"""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import _measured as measured
import lilo_definitions
import numpy as np
import torch
from _proof import Proof, medians_of
from lilo_definitions import ARCHITECTURES, Definition, architecture_of
from lilo_definitions.planner import Job, make_plan
from lilo_engine.operations.operation import ModelId
from torch.profiler import ProfilerActivity, profile
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.definitions import meta_models
from tests.miles_backend import reference as ref

GIB = 2**30
GPU_PEAK = 0.10
CPU_PEAK = 0.15
STEP = 0.25
PLAN_S, HELP_S = 0.5, 0.3
"""Of the whole command, by the clock; the median of some tries."""


def main() -> None:
    """Print every figure."""
    logging.disable(logging.WARNING)
    disable_progress_bar()
    proof = Proof("planner")
    for part in (published, gpu_rows, cpu_runs, parameters, every_definition, answer_times):
        with proof.part(part.__name__):
            part(proof)
    proof.end()


def _within(proof: Proof, figure: str, predicted: float, truth: float, tolerance: float) -> None:
    """A relative difference, with both values in the figure's name."""
    error = predicted / truth - 1
    good = abs(error) <= tolerance
    words = f"{figure}: predicted {predicted:.4g}, measured {truth:.4g}, relative difference"
    proof.figure(words, round(error, 4), f"within {tolerance:.0%}", good)


def published(proof: Proof) -> None:
    """The matched raw-Miles run of the 27B at 256k, through the command that people type."""
    command = [*_LILO, "plan", "qwen3_8_27b_miles_lora_256k", "--trainer", "miles", "--json"]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    name = "miles, 27B at 256k, peak GB (published)"
    peak = plan["peak_allocated_gb"]
    _within(proof, name, peak, measured.PUBLISHED_PEAK_GB, GPU_PEAK)
    definition = lilo_definitions.get("qwen3_8_27b_miles_lora_256k")
    job = Job.of(definition, context=measured.PUBLISHED_PASS_TOKENS)
    seconds = make_plan(job, "miles", rows=1).step.seconds
    name = "miles, 27B at 250.4k, seconds of a pass (published, sets the rate of 340 TFLOP/s)"
    _within(proof, name, seconds, measured.PUBLISHED_PASS_S, STEP)
    job = Job.of(lilo_definitions.get("qwen3_8_27b_miles_lora_128k"))
    seconds = make_plan(job, "miles", rows=measured.PUBLISHED_128K_ROWS).step.seconds
    name = "miles, 27B at 128k on 8 GPUs, seconds of a step of 128 rows (published, sets nothing)"
    _within(proof, name, seconds, measured.PUBLISHED_128K_STEP_S, STEP)


def gpu_rows(proof: Proof) -> None:
    """Every row: its peak and its speed; which of them the formulas were made with is said."""
    for row in measured.ROWS:
        plan = make_plan(row.job, rows=1)
        origin = "seen" if row.seen else "predicted"
        peak = plan.memory.peak / GIB
        _within(proof, f"H200 peak GiB ({origin}), {row.words}", peak, row.peak_gib, GPU_PEAK)
        if row.tokens_per_s is not None:
            speed = plan.step.tokens_per_s_per_rank
            name = f"H200 step time ({origin}), tokens/s, {row.words}"
            # Time, so that the tolerance is of seconds and not of their inverse.
            _within(proof, name, 1 / speed, 1 / row.tokens_per_s, STEP)
    for seen in (True, False):
        number = sum(row.seen is seen for row in measured.ROWS)
        proof.at_least("rows the formulas were made with" if seen else "rows predicted", number, 3)


def cpu_runs(proof: Proof) -> None:
    """tiny, 10M and 60M: the real trainer, one full microbatch, forward, backward and optimizer, now."""
    with tempfile.TemporaryDirectory(prefix="lilo-proof-") as folder:
        root = Path(folder)
        for name, definition, length in _models(root):
            rows = definition.limits.max_tokens_per_rank // length
            peak = _peak_of_a_step(definition, rows, length, root / f"run-{name}")
            job = replace(Job.of(definition), rows_per_microbatch=rows)
            predicted = make_plan(job).memory.peak
            words = f"CPU peak MB, {name}, {rows} rows of {length}"
            _within(proof, words, predicted / 1e6, peak / 1e6, CPU_PEAK)


def _models(root: Path) -> list[tuple[str, Definition, int]]:
    """Name, definition with one slot, tokens of a row."""
    tiny = lilo_definitions.get("tiny").derive(lora={"slots": 1})
    return [
        ("tiny", tiny, 512),
        ("10M", _random_model(root / "10M", hidden=384, layers=6, vocab=2048, tokens=4096), 256),
        ("60M", _random_model(root / "60M", hidden=640, layers=11, vocab=8192, tokens=2048), 1024),
    ]


def _random_model(folder: Path, *, hidden: int, layers: int, vocab: int, tokens: int) -> Definition:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return lilo_definitions.get("tiny").derive(
        name=folder.name,
        model={"name": folder.name, "source": str(folder), "vocab_size": vocab},
        lora={"slots": 1},
        limits={"max_tokens_per_rank": tokens},
    )


def _peak_of_a_step(definition: Definition, rows: int, length: int, root: Path) -> int:
    """Most bytes that torch had allocated at once in this process's trainer."""
    rng, model_id = np.random.default_rng(0), ModelId("m")
    data = [ref.datum(length, rng, vocab=definition.model.vocab_size) for _ in range(rows)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        backend = ref.start(definition, root)
        backend.create_adapter(model_id, ref.spec(definition.lora.max_rank))
        (output,) = ref.run(backend, ref.item(model_id, data))
        backend.optim_step(model_id, ref.ADAM)
    backend.close()
    assert output.error is None, output.error
    trace = root / "trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    with gzip.open(trace) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def parameters(proof: Proof) -> None:
    """Every family and size, equal to the parameter."""
    models = {**ARCHITECTURES, "tiny": architecture_of(lilo_definitions.get("tiny"))}
    for name, model in models.items():
        proof.equal(f"parameters of {name}", model.parameters, meta_models.count(model))


def every_definition(proof: Proof) -> None:
    """Loads, validates, plans; and fits where it says which GPUs it takes."""
    for name in lilo_definitions.names():
        plan = make_plan(Job.of(lilo_definitions.get(name)))
        words = f"{name} plans, fits"
        proof.figure(words, plan.fits, "true, or null on CPU", plan.fits is not False)


def answer_times(proof: Proof) -> None:
    """What a person waits for."""
    for words, limit in (("plan qwen3_8_27b_miles_lora_256k", PLAN_S), ("--help", HELP_S)):
        wall, busy = medians_of([*_LILO, *words.split()])
        proof.at_most(f"lilo {words}, s by the clock (processor {busy:.2f} s)", wall, limit)


_LILO = [str(Path(sys.executable).parent / "lilo")]


if __name__ == "__main__":
    main()
