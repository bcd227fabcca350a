"""Check of whole passes: that nothing in one waits for the device, and that its peak of memory is the one that was planned.

Waiting is looked for by torch itself, which raises at every synchronization it knows of, around passes of each loss, over
long rows and short ones, after two that may compile and plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lilo_definitions.trainer import KEEPS
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.tensor import Tensor
from lilo_miles_backend.bench.native import Layout, Trainer, definition, random_datums
from lilo_miles_backend.ranks import batch as batches
from lilo_miles_backend.ranks.collectives import ALONE
from lilo_miles_backend.ranks.dtype import compute_dtype
from lilo_miles_backend.ranks.levels import LayerLevels
from lilo_miles_backend.ranks.memory import DeviceMemory

from benchmarks.gpu.lines import at_most, bound, emit, part
from benchmarks.gpu.models import model_folder

CASE = "check_passes"
PEAK_ERROR = 0.10
"""Of the planned peak against the measured one."""
LOSSES = ("cross_entropy", "ppo", "gspo")


def main() -> None:
    """Waiting first, then memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", nargs="*", type=int, default=[4096, 16_384, 65_536])
    given = parser.parse_args()
    folder, architecture = model_folder(given.model, given.layers)
    layout = Layout(device=given.device, keep="auto")
    what = definition(folder, architecture, max(given.lengths), layout)
    with Trainer(what) as trainer:
        for loss in LOSSES:
            with part(CASE, f"waiting, {loss}"):
                check_waiting(trainer, loss, min(given.lengths))
        for tokens in given.lengths:
            for keep in (*KEEPS, "auto"):
                with part(CASE, f"memory, {keep}, {tokens}"):
                    check_memory(trainer, keep, tokens)


def check_waiting(trainer: Trainer, loss: str, tokens: int) -> None:
    """One long row, then rows of several lengths."""
    cuda = trainer.definition.topology.device == "cuda"
    vocabulary = trainer.definition.model.vocab_size
    for lengths in ([tokens], [tokens // 2, tokens // 8, 77, 5]):
        datums = [with_inputs(one, loss) for one in random_datums(lengths, vocabulary)]
        for _ in range(2):
            run(trainer, loss, datums)
        with watched(cuda):
            run(trainer, loss, datums)
        bound(CASE, f"{loss}, rows of {lengths}: nothing waits", "nothing", "nothing", True)


@contextmanager
def watched(cuda: bool) -> Iterator[None]:
    """Whatever waits for the device inside a pass raises; reading the answers afterwards may."""
    module: Any = batches
    inner = module.run_pass

    def watching(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return inner(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    if cuda:
        module.run_pass = watching
    try:
        yield
    finally:
        module.run_pass = inner


def with_inputs(datum: Datum, loss: str) -> Datum:
    """The datum with what a policy loss reads."""
    if loss == "cross_entropy":
        return datum
    count, rng = datum.num_tokens, np.random.default_rng(0)
    inputs = {"logprobs": rng.normal(size=count) - 11.0, "advantages": rng.normal(size=count)}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = np.ones(count)
    tensors = {name: Tensor.of(values, "float32") for name, values in inputs.items()}
    targets = {"target_tokens": datum.loss_inputs["target_tokens"]}
    return Datum(tokens=datum.tokens, loss_inputs={**targets, **tensors})


def run(trainer: Trainer, loss: str, datums: Sequence[Datum]) -> dict[str, float]:
    """One pass of the first adapter; its metrics."""
    (model_id, *_) = trainer.models
    item = WorkItem(operation_id="check", model_id=model_id, datums=tuple(datums))
    batch = Batch(loss=loss, config={}, forward_only=False, items=(item,))
    (output,) = trainer.backend.forward_backward(batch)
    if output.error is not None:
        raise RuntimeError(output.error)
    return dict(output.metrics)


def check_memory(trainer: Trainer, keep: str, tokens: int) -> None:
    """One row, with layers that keep so much; what the planner says of it."""
    what = trainer.definition.derive(trainer={"keep_activations": keep})
    ranks: Any = trainer.backend.ranks  # in this process, with one rank
    runner = ranks.rank._batches
    device = torch.device(what.topology.device)
    levels = LayerLevels(what, DeviceMemory(device, compute_dtype(what)), ALONE)
    runner.limits = replace(runner.limits, levels=levels.of)
    datums = random_datums([tokens], what.model.vocab_size)
    run(trainer, "cross_entropy", datums)
    metrics = run(trainer, "cross_entropy", datums)
    planned, measured = levels.planned_bytes(tokens), metrics["peak_memory_bytes:max"]
    emit(
        CASE,
        setting=f"keep {keep}",
        tokens=tokens,
        tok_s=tokens / metrics["seconds:sum"],
        gib=measured / 2**30,
        planned_gib=None if planned is None else planned / 2**30,
        utilisation=metrics.get("utilisation:mean"),
    )
    if planned is not None:
        error = abs(planned / measured - 1)
        at_most(CASE, f"keep {keep} at {tokens}: planned against measured", error, PEAK_ERROR)


if __name__ == "__main__":
    main()
