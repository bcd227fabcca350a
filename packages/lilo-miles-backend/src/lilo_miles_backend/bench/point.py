"""Points: one setting of one trainer, measured at some lengths: speed, peak memory, useful operations.

A setting is measured in a process of its own: `python -m lilo_miles_backend.bench.point`, started by `gpu.py`, prints one
JSON object per length. `benchmarks/gpu/` calls the functions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lilo_definitions.architecture import Architecture

from lilo_miles_backend.bench.clock import timed
from lilo_miles_backend.bench.costs import CEILING, useful
from lilo_miles_backend.bench.native import Layout, Trainer, definition, random_datums
from lilo_miles_backend.bench.peer import Peer, use_liger
from lilo_miles_backend.bench.random_model import SHAPES, model_folder

Point: TypeAlias = dict[str, Any]
"""`setting`, `tokens`, and `tok_s`, `peak_gib`, ... or `out_of_memory` or `error`."""

LONG = 100_000
"""Rows over so many tokens are run fewer times."""


def ours(
    root: Path, model: str, layers: int, keep: str, lengths: Sequence[int], device: str = "cuda"
) -> Iterator[Point]:
    """Our trainer with this much kept; one backend for all lengths."""
    folder, architecture = model_folder(root, model, layers)
    what = definition(folder, architecture, max(lengths), Layout(device=device, keep=keep))
    with Trainer(what) as trainer:
        for tokens in lengths:
            data = {trainer.models[0]: random_datums([tokens], architecture.vocab)}
            yield _point(
                f"ours, keep {keep}",
                architecture,
                tokens,
                lambda data=data: trainer.step(data),
                keep=keep,
            )


def theirs(
    model: str, layers: int, lengths: Sequence[int], *, liger: bool, device: str = "cuda"
) -> Iterator[Point]:
    """Hugging Face + PEFT, without and with checkpointing."""
    if liger:
        use_liger()
    peer = Peer(SHAPES[model], layers, device)
    for checkpointing in (False, True):
        peer.checkpoint(checkpointing)
        words = "checkpointing" if checkpointing else "no checkpointing"
        name = f"HF + PEFT{' + Liger' if liger else ''}, {words}"
        for tokens in lengths:
            yield _point(name, peer.architecture, tokens, lambda tokens=tokens: peer.step(tokens))


def _point(
    setting: str,
    architecture: Architecture,
    tokens: int,
    step: Callable[[], object],
    **more: object,
) -> Point:
    known: Point = {"setting": setting, **more, "tokens": tokens}
    few = tokens > LONG
    try:
        timing = timed(step, warm=1 if few else 2, runs=2 if few else 6, budget_s=12.0)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return known | {"out_of_memory": True}
    except Exception as error:  # the other lengths still tell something
        out_of_memory = "out of memory" in str(error)
        torch.cuda.empty_cache()
        return known | ({"out_of_memory": True} if out_of_memory else {"error": str(error)[:300]})
    speed = useful(architecture, [tokens]) / timing.best_s
    return known | {
        "tok_s": tokens / timing.best_s,
        "tok_s_median": tokens / timing.median_s,
        "peak_gib": timing.peak_gib,
        "useful_tflops": speed / 1e12,
        "useful_share": speed / CEILING,
        "seconds": list(timing.all_s),
    }


def main() -> None:
    """Print the points of one setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("setting", help="ours:KEEP, peer or liger")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    kind, _, keep = given.setting.partition(":")
    if kind not in ("ours", "peer", "liger"):
        parser.error(f"{given.setting!r} is no setting; expected ours:KEEP, peer or liger")
    points = (
        ours(given.root, given.model, given.layers, keep, given.lengths, given.device)
        if kind == "ours"
        else theirs(
            given.model, given.layers, given.lengths, liger=kind == "liger", device=given.device
        )
    )
    for point in points:
        sys.stdout.write(json.dumps(point) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
