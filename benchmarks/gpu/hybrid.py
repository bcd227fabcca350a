"""Hybrid: layers of the 27B hybrid at TP2 x CP8 and TP2 x CP4, one rank's share, and what they say of 64 layers.

Time and memory of one layer of each kind are differences between models that differ by such layers alone: 2 and 4 layers
with softmax attention, and those 4 with 12 delta nets. The prediction adds what is missing here: traffic between ranks,
counted as if none of it were hidden.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.operations.operation import ModelId
from lilo_miles_backend.bench.clock import GIB, timed
from lilo_miles_backend.bench.native import ADAM, Layout, definition, random_datums, spec
from lilo_miles_backend.rank_commands import CreateAdapter, DropGradients, RunBatch, StepOptimizer
from lilo_miles_backend.ranks.rank import Rank

from benchmarks.gpu.emulated import emulate, rank_of
from benchmarks.gpu.lines import emit, part
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.predict import PUBLISHED, Layer, predictions

CASE = "hybrid"
LENGTHS = (16_384, 65_536, 262_144)
LEVELS = {8: ("all", "qkv", "input"), 4: ("input", "all")}
"""By context-parallel ranks; on 8 GPUs only the last level fits, and one more says what the head takes."""
MODEL = ModelId("m0")


@dataclass(frozen=True)
class Measured:
    """One model at one length and level."""

    seconds: float
    gib: float
    """Most that was allocated above what is held throughout."""


def main() -> None:
    """A delta net's kernels, then two layouts; at CP4 only the longest rows, which are what one node is for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="27b")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--cp", nargs="*", type=int, default=[8, 4])
    arguments = parser.parse_args()
    device, cp = torch.device(arguments.device), max(arguments.cp)
    if device.type == "cuda":
        # Imported here, since it imports Triton.
        from benchmarks.gpu import delta_kernels

        with part(CASE, "a delta net's kernels"):
            delta_kernels.show_mixer(CASE, max(arguments.lengths) // cp, cp, device)
            delta_kernels.show_step(CASE, max(arguments.lengths) // cp, device)
        torch.cuda.empty_cache()
    emulate()
    for cp in arguments.cp:
        lengths = arguments.lengths if cp == max(arguments.cp) else arguments.lengths[-1:]
        with part(CASE, f"TP2 x CP{cp}"):
            layout(arguments, cp, lengths)
    emit(CASE, **PUBLISHED)


def layout(arguments: argparse.Namespace, cp: int, lengths: list[int]) -> None:
    """All three models in one layout, then the differences."""
    found: dict[tuple[str, int, str], Measured] = {}
    for name, layers, interval in (("2 softmax", 2, 1), ("4 softmax", 4, 1), ("4 + 12", 16, 4)):
        for (tokens, keep), measured in model(
            arguments, cp, lengths, name, layers, interval
        ).items():
            found[name, tokens, keep] = measured
    for tokens in lengths:
        kinds: dict[str, Mapping[str, Layer]] = {}
        for keep in LEVELS.get(cp, LEVELS[8]):
            if any(
                (name, tokens, keep) not in found for name in ("2 softmax", "4 softmax", "4 + 12")
            ):
                continue
            few, more, mixed = (
                found[name, tokens, keep] for name in ("2 softmax", "4 softmax", "4 + 12")
            )
            softmax, delta = _each(more, few, 2), _each(mixed, more, 12)
            kinds[keep] = {"softmax": softmax, "delta": delta}
            rest = few.seconds - 2 * softmax.seconds
            emit(
                CASE,
                setting=f"TP2 x CP{cp}, keep {keep}, a layer",
                tokens=tokens,
                softmax_s=softmax.seconds,
                softmax_gib=softmax.gib,
                delta_s=delta.seconds,
                delta_gib=delta.gib,
                head_and_rest_s=rest,
            )
        two = found.get(("2 softmax", tokens, "all"))
        for line in (
            predictions(cp, tokens, kinds, Layer(seconds=two.seconds, gib=two.gib)) if two else ()
        ):
            emit(CASE, **line)


def _each(more: Measured, few: Measured, layers: int) -> Layer:
    return Layer(
        seconds=(more.seconds - few.seconds) / layers, gib=max(more.gib - few.gib, 0.0) / layers
    )


def model(
    arguments: argparse.Namespace,
    cp: int,
    lengths: list[int],
    name: str,
    layers: int,
    interval: int,
) -> dict[tuple[int, str], Measured]:
    """One model at every length and level."""
    folder, architecture = model_folder(arguments.model, layers, interval)
    what = definition(
        folder, architecture, max(lengths), Layout(device=arguments.device, tp=2, cp=cp)
    )
    found: dict[tuple[int, str], Measured] = {}
    with tempfile.TemporaryDirectory(prefix="lilo-hybrid-") as root:
        rank = rank_of(what, root)
        try:
            rank.execute(CreateAdapter(model_id=MODEL, spec=spec(0), drawn_seed=0))
            for tokens in lengths:
                for keep in LEVELS.get(cp, LEVELS[8]) if tokens == max(lengths) else ("all",):
                    with part(CASE, f"{name}, CP{cp}, {tokens}, keep {keep}"):
                        found[tokens, keep] = measure(
                            rank, tokens, keep, layers, architecture.vocab
                        )
                        emit(
                            CASE,
                            setting=f"{name} layers, TP2 x CP{cp}, keep {keep}",
                            tokens=tokens,
                            step_s=found[tokens, keep].seconds,
                            gib_above_weights=found[tokens, keep].gib,
                        )
        finally:
            rank.close()
    return found


def measure(rank: Rank, tokens: int, keep: str, layers: int, vocabulary: int) -> Measured:
    """Steps of one row of which this rank has its part."""
    # A definition has one level; rebuilding the rank for each would cost more than measuring it.
    batches = rank._batches
    batches.limits = replace(batches.limits, levels=lambda _: (keep,) * layers)
    item = WorkItem(
        operation_id="op", model_id=MODEL, datums=tuple(random_datums([tokens], vocabulary))
    )
    batch = Batch(loss="cross_entropy", config={}, forward_only=False, items=(item,))

    def step() -> None:
        rank.execute(RunBatch(batch=batch))
        rank.execute(StepOptimizer(model_id=MODEL, params=ADAM))

    rank.execute(DropGradients(model_id=MODEL))
    held = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    # Attention's kernels plan a short shape when they meet it for the second time.
    timing = timed(step, warm=1 if tokens > 32_768 else 2, runs=3, budget_s=3.0)
    return Measured(seconds=timing.best_s, gib=timing.peak_gib - held)


if __name__ == "__main__":
    main()
