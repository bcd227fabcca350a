"""Rows of any length fit any layout: the alignment rule over TP 1-8 x CP 1-8, and N positions give N logprobs over the SDK.

The arithmetic is checked against the conditions themselves, tried number by number; two servers with real ranks, one that
pads always and one that never does, are asked through the SDK.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from _proof import (
    Proof,
    adam,
    connect,
    datum,
    largest_difference,
    logprobs,
    outcome,
    step,
    tokens,
)
from lilo_definitions import Topology
from lilo_engine.demo.server import LocalServer
from lilo_miles_backend.ranks.alignment import Alignment, required_multiple
from lilo_miles_backend.ranks.stream import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tinker

DEGREES = range(1, 9)
LENGTHS = (1, 2, 3, 4, 7, 8, 9, 10, 11, 31)
START_LIMIT_S = 400.0
"""Every rank imports torch and Megatron, on however few cores."""
CLOSE = 1e-4
"""Between layouts, of logprobs in float32."""
LAYOUT = """\
extends: tiny
topology: {{tp: {tp}, cp: {cp}, align_sequences_to_parallel_layout: '{mode}'}}
limits: {{startup_timeout_s: {start_s}}}
"""


def main() -> None:
    """All figures."""
    proof = Proof("alignment")
    worked_example(proof)
    arithmetic(proof)
    with tempfile.TemporaryDirectory(prefix="lilo-proof-") as folder:
        with proof.part("through the SDK"):
            over_the_sdk(proof, Path(folder))
        with proof.part("off"):
            refused(proof, Path(folder))
    proof.end()


def worked_example(proof: Proof) -> None:
    """10 positions and the last target at TP8 x CP3."""
    rule = Alignment.of(
        Topology(tp=8, cp=3, align_sequences_to_parallel_layout="on"), sequence_parallel=False
    )
    row = rule.row(10)
    found = [row.tokens, row.targets, row.zero_weights, row.logprobs]
    proof.equal(
        "on, TP8 x CP3, 11 tokens: padded, targets, zero weights, logprobs", found, [48, 47, 37, 10]
    )


def arithmetic(proof: Proof) -> None:
    """Every degree: the least number that satisfies the layout's conditions, and rows that are covered exactly."""
    wrong: list[str] = []
    for tp, cp, sequence_parallel in product(DEGREES, DEGREES, (False, True)):
        found = required_multiple(tp, cp, sequence_parallel)
        if found != least(tp, cp, sequence_parallel):
            wrong.append(f"tp {tp} cp {cp}")
    proof.equal("required multiples of 2 x 64 layouts that are wrong", wrong, [])
    proof.equal("rows that ranks do not cover once and in order", sorted(uncovered()), [])
    title = "multiple by cp (down) and tp (across): without / with sequence parallelism, and on"
    print(title, file=sys.stderr)
    for cp in DEGREES:
        cells = (
            f"{required_multiple(tp, cp, False)}/{required_multiple(tp, cp, True)} {2 * cp * tp}"
            for tp in DEGREES
        )
        print(f"cp {cp}: " + " | ".join(f"{cell:>10}" for cell in cells), file=sys.stderr)


def least(tp: int, cp: int, sequence_parallel: bool) -> int:
    """By trying: rows cut into 2 x cp chunks (if they are cut), a rank's two chunks into tp pieces (if those are)."""
    return next(
        n
        for n in range(1, 2 * tp * cp + 1)
        if (cp == 1 or n % (2 * cp) == 0) and (not sequence_parallel or (n // cp) % tp == 0)
    )


def uncovered() -> set[str]:
    """Layouts and lengths for which some position is on no rank or on two, or counted as real and is not."""
    bad: set[str] = set()
    for tp, cp, mode in product(DEGREES, DEGREES, ("auto", "on")):
        topology = Topology(tp=tp, cp=cp, align_sequences_to_parallel_layout=mode)
        rule = Alignment.of(topology, sequence_parallel=False)
        for length in {1, 2, 3, rule.multiple - 1 or 1, rule.multiple, rule.multiple + 1}:
            lengths = (length, 5, 1)
            padded = [rule.padded(one) for one in lengths]
            streams = [pack(lengths, padded, rank, cp) for rank in range(cp)]
            places = sorted(place for one in streams for place in one.places.tolist())
            real = sum(int(one.is_real.sum()) for one in streams)
            if places != list(range(sum(padded))) or real != sum(lengths):
                bad.add(f"{mode} tp {tp} cp {cp} length {length}")
    return bad


@contextmanager
def served(folder: Path, tp: int, cp: int, mode: str) -> Iterator[LocalServer]:
    """`lilo serve` of tiny in a layout."""
    path = folder / f"tiny-{tp}-{cp}-{mode}.yaml"
    path.write_text(LAYOUT.format(tp=tp, cp=cp, mode=mode, start_s=START_LIMIT_S), "utf-8")
    server = LocalServer(str(path), folder / path.stem)
    server.start(START_LIMIT_S)
    try:
        yield server
    finally:
        server.stop()


def model_of(server: LocalServer) -> tinker.TrainingClient:
    """A fresh model whose B is zero: all servers' are the same."""
    return connect(server).create_lora_training_client("tiny", rank=4, seed=1)


def over_the_sdk(proof: Proof, folder: Path) -> None:
    """Mode `on` at TP2 x CP2 (multiple 8) against one rank."""
    data = [datum(tokens(length, length + 1)) for length in LENGTHS]
    with LocalServer("tiny", folder / "one") as server:
        alone = logprobs(model_of(server), data)
    with served(folder, 2, 2, "on") as server:
        client = model_of(server)
        padded = logprobs(client, data)
        losses = [step(client, data) for _ in range(3)]
    proof.equal("on, TP2 x CP2: logprobs per datum", [len(row) for row in padded], list(LENGTHS))
    worst = largest_difference(alone, padded)
    proof.at_most("on, TP2 x CP2: logprobs against one rank, max|d|", worst, CLOSE)
    proof.equal("on, TP2 x CP2: the loss falls over three steps", losses[-1] < losses[0], True)


def refused(proof: Proof, folder: Path) -> None:
    """Mode `off` at CP2: a multiple of 4 runs, anything else is refused in words, and nothing is lost."""
    with served(folder, 1, 2, "off") as server:
        client = model_of(server)
        good = [datum(tokens(1, 9))]
        first = step(client, good)
        error, seconds = outcome(
            lambda: client.forward_backward([datum(tokens(2, 8))], "cross_entropy")
        )
        named = error is not None and "multiple of 4" in error
        proof.figure("off, CP2: 7 positions are refused", error, "names the multiple 4", named)
        proof.at_most("off: seconds until then", seconds, 2.0)
        outcome(lambda: client.optim_step(adam()))  # refused, which ends the window
        proof.equal("off: the next window trains", step(client, good) < first, True)


if __name__ == "__main__":
    main()
