"""The embedded sampler on a device: its numbers against transformers, what it waits for, and how fast an 8B model goes.

Exactness is that of samples: tokens are drawn with several rows and prefilled prompts in one batch, then scored by one
full forward pass of transformers in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lilo_engine.sampling.engine import SampleRequest, SampleResult, SamplingParams
from lilo_miles_backend.sampler.adapters import Adapter
from lilo_miles_backend.sampler.batch import Batch
from lilo_miles_backend.sampler.model import Model
from lilo_miles_backend.sampler.sequence import Job
from lilo_miles_backend.sampler.weights import BaseWeights, read_base

from benchmarks.gpu.lines import at_most, bound, emit, part
from benchmarks.gpu.models import model_folder
from tests.sampling.families import FAMILIES, make_model

CASE = "check_sampler"
TOLERANCE = 1e-4
CONTEXT = 4096


def main() -> None:
    """All parts; each fails for itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    import_reference()
    for family in FAMILIES:
        with part(CASE, f"{family}: numbers"), tempfile.TemporaryDirectory() as folder:
            check_family(family, Path(folder), device)
    with part(CASE, "an 8B model"):
        time_model(arguments.model, device)


def import_reference() -> None:
    """Have transformers take its own torch kernels for delta nets: those of fla, where it is installed, need a GPU."""
    there = sys.modules.get("fla")
    sys.modules["fla"] = None  # pyright: ignore[reportArgumentType] - what stops an import
    importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    del sys.modules["fla"]
    if there is not None:
        sys.modules["fla"] = there


@torch.inference_mode()
def check_family(family: str, folder: Path, device: torch.device) -> None:
    """Float32 must equal transformers; bfloat16 must be no further from it than transformers' own."""
    reference: Any = make_model(family, folder)
    exact = Model(read_base(folder, dtype=torch.float32, device=device))
    answers = drawn(exact, prompts=[3, 70, 600], samples=3, new=24)
    worst = max(
        float(np.abs(scored(reference, ids)[len(prompt) - 1 :] - got).max())
        for prompt, ids, got in answers
    )
    at_most(CASE, f"{family}: float32 logprobs of samples against transformers", worst, TOLERANCE)
    if device.type == "cuda":
        check_waits(exact, family)
    rough = Model(read_base(folder, dtype=torch.bfloat16, device=device))
    ids = torch.arange(400)[None] * 7 % 90
    wanted = reference(ids).logits[0].log_softmax(-1)
    theirs = reference.to(device, torch.bfloat16)(ids.to(device)).logits[0].float().log_softmax(-1)
    hidden = rough.forward(
        ids.to(device), [0], [400], rough.new_cache(max_rows=1, max_length=400), [None]
    )
    ours = rough.logits(hidden[0], [None] * 400).log_softmax(-1)
    off = {
        who: float((found.cpu() - wanted).abs().mean())
        for who, found in (("sampler", ours), ("transformers", theirs))
    }
    emit(CASE, setting=f"{family}: mean error of bfloat16 logprobs", **off)
    limit = 1.25 * off["transformers"]
    at_most(CASE, f"{family}: bfloat16 against transformers' own", off["sampler"], limit)


def check_waits(model: Model, family: str) -> None:
    """A step waits for the device as often as it has tables to send, however many layers there are."""
    found = []
    for layers in (1, len(model.base.layers)):
        part_of = BaseWeights(
            shape=model.base.shape,
            embedding=model.base.embedding,
            head=model.base.head,
            norm=model.base.norm,
            layers=model.base.layers[:layers],
            eos_tokens=(),
        )
        less = Model(part_of)
        cache = less.new_cache(max_rows=2, max_length=64)
        tokens = torch.ones((2, 1), dtype=torch.int64, device=model.base.device)
        waits = 0
        for step in range(2):  # the first one allocates
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                less.forward(tokens, [step, step], [1, 1], cache, [None, None])
            waits = len(caught)
            torch.cuda.set_sync_debug_mode("default")
        found.append(waits)
    bound(
        CASE,
        f"{family}: waits of a step with 1 layer and with all",
        found,
        "equal",
        found[0] == found[1],
    )


def time_model(name: str, device: torch.device) -> None:
    """Seconds to read it, and tokens a second of rows that generate and of a prompt."""
    folder, _ = model_folder(name)
    host_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    base = read_base(folder, dtype=torch.bfloat16, device=device)
    _settle(device)
    emit(
        CASE,
        setting=f"{name}: read to the device",
        seconds=time.perf_counter() - started,
        gib=_allocated(device),
        # Mapped files count; they are the system's to take back.
        host_gib=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host_before) / 2**20,
    )
    model = Model(base)
    adapters = [_adapter(base, f"a{i}") for i in range(4)]
    drawn(model, prompts=[16], samples=1, new=4)
    for rows, used in ((1, ()), (8, ()), (32, ()), (32, adapters)):
        seconds = _timed(model, [64] * rows, 65, used) - _timed(model, [64] * rows, 1, used)
        emit(
            CASE,
            setting=f"{name}: {rows} rows generate, {len(used)} adapters",
            tok_s=rows * 64 / seconds,
            ms_per_step=1000 * seconds / 64,
        )
    seconds = _timed(model, [CONTEXT - 8], 1, ())
    emit(CASE, setting=f"{name}: a prompt of {CONTEXT - 8} tokens", tok_s=(CONTEXT - 8) / seconds)
    emit(CASE, setting=f"{name}: allocated at the end", gib=_allocated(device))


def _timed(model: Model, prompts: Sequence[int], new: int, adapters: Sequence[Adapter]) -> float:
    """Of the second of two runs."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        drawn(model, prompts, samples=1, new=new, adapters=adapters)
        _settle(model.base.device)
        seconds = time.perf_counter() - started
    return seconds


@torch.inference_mode()
def drawn(
    model: Model,
    prompts: Sequence[int],
    *,
    samples: int,
    new: int,
    adapters: Sequence[Adapter] = (),
) -> list[tuple[list[int], list[int], np.ndarray]]:
    """Samples of prompts of these lengths in one batch: prompt, prompt with the drawn tokens, their logprobs."""
    batch = Batch(model, max_rows=64, max_length=CONTEXT)
    answers: dict[int, Any] = {}
    texts = [[(31 * i + 7 * k) % 90 for k in range(length)] for i, length in enumerate(prompts)]
    for i, prompt in enumerate(texts):
        asked = SampleRequest(
            request_id=str(i),
            prompt=np.asarray(prompt, dtype="<i4").tobytes(),
            num_samples=samples,
            adapter=None,
            params=SamplingParams(max_tokens=new, temperature=1.0, seed=i),
        )
        job = Job(
            request=asked,
            prompt=prompt,
            adapter=adapters[i % len(adapters)] if adapters else None,
            max_new=new,
            stop_strings=None,
            deliver=lambda outcome, i=i: answers.__setitem__(i, outcome),
        )
        batch.submit(job)
    while batch.busy:
        batch.step()
    found = []
    for i, prompt in enumerate(texts):
        if not isinstance(answers[i], SampleResult):
            raise answers[i]
        for sequence in answers[i].sequences:
            tokens = np.frombuffer(sequence.tokens, dtype="<i4").tolist()
            logprobs = np.frombuffer(sequence.logprobs, dtype="<f4")
            found.append((prompt, [*prompt, *tokens], logprobs))
    return found


def scored(reference: Any, ids: list[int]) -> np.ndarray:
    """Logprob of every token after the first."""
    x = torch.tensor([ids])
    values = reference(x).logits[0, :-1].log_softmax(-1)
    return values.gather(-1, x[0, 1:, None])[:, 0].numpy()


def _adapter(base: BaseWeights, name: str, rank: int = 32) -> Adapter:
    """Of full size and without effect: only its time counts."""
    factors = {}
    for index, layer in enumerate(base.layers):
        for place, weight in layer.fused.items():
            out, width = weight.shape
            a = torch.zeros((rank, width), dtype=base.dtype, device=base.device)
            factors[index, place] = (a, a.new_zeros((out, rank)))
    return Adapter(name, name, factors)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


if __name__ == "__main__":
    main()
