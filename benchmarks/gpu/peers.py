"""Peers: Hugging Face + PEFT on the slice's shape, lengths and clock: plain or with Liger, with or without checkpointing."""

from __future__ import annotations

import argparse

from lilo_miles_backend.bench.point import theirs

from benchmarks.gpu.lines import part, point

CASE = "peers"
LENGTHS = (4096, 16384, 65536)


def main() -> None:
    """One process with Liger, or without."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    given = parser.parse_args()
    with part(CASE, "Liger" if given.liger else "plain"):
        for found in theirs(
            given.model, given.layers, given.lengths, liger=given.liger, device=given.device
        ):
            point(CASE, found)


if __name__ == "__main__":
    main()
