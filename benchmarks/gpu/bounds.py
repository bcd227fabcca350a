"""Bounds that compare cases: our slice with its floors, and with Hugging Face + PEFT of the same call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

Line: TypeAlias = dict[str, Any]

FLOORS = {4096: 48_000.0, 16_384: 39_000.0, 65_536: 21_000.0}
"""Tokens a second of the slice, everything kept."""
FAST = {16_384: 1.25, 65_536: 1.5}
"""Against the fastest setting of Hugging Face + PEFT that fits."""
LEAN_TOKENS, LEAN = 16_384, 1.4
"""Against the leanest one, with no more memory than it."""
LONGEST = 131_072


def across_cases(lines: Sequence[Line]) -> list[Line]:
    """Every bound whose lines are there."""
    ours = [line for line in lines if line.get("case") == "slice" and "tok_s" in line]
    peers = [line for line in lines if line.get("case") == "peers" and "tok_s" in line]
    return [*_floors(ours), *_fast(ours, peers), *_lean(ours, peers)]


def _floors(ours: Sequence[Line]) -> Iterable[Line]:
    for tokens, floor in FLOORS.items():
        if line := _best(ours, tokens, "all"):
            yield _bound(f"slice at {tokens}: tokens a second", line["tok_s"], floor)
    if ours:
        longest = max(line["tokens"] for line in ours)
        yield _bound("slice: longest row that ran, tokens", longest, LONGEST)


def _fast(ours: Sequence[Line], peers: Sequence[Line]) -> Iterable[Line]:
    for tokens, factor in FAST.items():
        line, peer = _best(ours, tokens, "all"), _best(peers, tokens)
        if line and peer:
            figure = f"fast at {tokens}: speed over {peer['setting']}, the fastest that fits"
            yield _bound(figure, line["tok_s"] / peer["tok_s"], factor)


def _lean(ours: Sequence[Line], peers: Sequence[Line]) -> Iterable[Line]:
    """Our fastest level that needs no more memory than their leanest setting; our leanest one, if none does."""
    theirs = [line for line in peers if line["tokens"] == LEAN_TOKENS]
    leanest = min(theirs, key=lambda line: line["peak_gib"], default=None)
    mine = sorted(
        (line for line in ours if line["tokens"] == LEAN_TOKENS), key=lambda line: line["peak_gib"]
    )
    if leanest is None or not mine:
        return
    fitting = [line for line in mine if line["peak_gib"] <= leanest["peak_gib"]] or mine[:1]
    lean = max(fitting, key=lambda line: line["tok_s"])
    who = f"{leanest['setting']}, the leanest"
    yield {
        "case": "bounds",
        "figure": f"lean at {LEAN_TOKENS} ({lean['setting']}): GiB against {who}",
        "measured": lean["peak_gib"],
        "required": f"<= {leanest['peak_gib']:g}",
        "pass": lean["peak_gib"] <= leanest["peak_gib"],
    }
    yield _bound(f"lean: speed over {who}", lean["tok_s"] / leanest["tok_s"], LEAN)


def _best(lines: Sequence[Line], tokens: int, keep: str | None = None) -> Line | None:
    fitting = [
        line
        for line in lines
        if line["tokens"] == tokens and (keep is None or line.get("keep") == keep)
    ]
    return max(fitting, key=lambda line: line["tok_s"], default=None)


def _bound(figure: str, measured: float, floor: float) -> Line:
    return {
        "case": "bounds",
        "figure": figure,
        "measured": float(f"{measured:.4g}"),
        "required": f">= {floor:g}",
        "pass": measured >= floor,
    }
