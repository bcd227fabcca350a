"""Slice: 8 layers of Qwen3-8B's shape and its head, one sequence a step, with optimizer: what keeps, what it costs.

A backend for each level of what layers keep: `all` is the fast setting, `input` the lean one.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lilo_miles_backend.bench.point import ours

from benchmarks.gpu.lines import part, point

CASE = "slice"
PLAN = {"all": (4096, 16_384, 65_536, 131_072), "attention": (16_384,), "input": (16_384, 65_536)}


def main() -> None:
    """Every level at its lengths."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keep", nargs="*", default=list(PLAN))
    parser.add_argument("--lengths", nargs="*", type=int)
    given = parser.parse_args()
    root = Path(os.environ["LILO_BENCH_MODELS"])
    for keep in given.keep:
        with part(CASE, f"keep {keep}"):
            lengths = given.lengths or PLAN[keep]
            for found in ours(root, given.model, given.layers, keep, lengths, given.device):
                point(CASE, found)


if __name__ == "__main__":
    main()
