"""Bounds of the GPU benchmarks that compare cases: from the lines of one call."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.bounds import across_cases


def ours(keep: str, tokens: int, tok_s: float, peak_gib: float) -> dict[str, Any]:
    return {
        "case": "slice",
        "setting": f"ours, keep {keep}",
        "keep": keep,
        "tokens": tokens,
        "tok_s": tok_s,
        "peak_gib": peak_gib,
    }


def theirs(setting: str, tokens: int, tok_s: float, peak_gib: float) -> dict[str, Any]:
    return {
        "case": "peers",
        "setting": setting,
        "tokens": tokens,
        "tok_s": tok_s,
        "peak_gib": peak_gib,
    }


PEERS = [
    theirs("fast", 16_384, 32_000.0, 36.0),
    theirs("lean", 16_384, 24_000.0, 11.5),
    {"case": "peers", "setting": "fast", "tokens": 65_536, "out_of_memory": True},
    theirs("lean", 65_536, 15_000.0, 29.0),
]


def holds(lines: list[dict[str, Any]]) -> dict[str, bool]:
    return {line["figure"].partition(":")[0]: line["pass"] for line in across_cases(lines)}


def test_fast_is_compared_with_the_fastest_peer_that_fits() -> None:
    lines = [ours("all", 16_384, 41_000.0, 18.0), ours("all", 65_536, 22_000.0, 50.0), *PEERS]
    found = holds(lines)
    assert found["fast at 16384"]  # 1.28 times 32,000
    assert not found["fast at 65536"]  # 1.47 times 15,000


def test_lean_is_our_fastest_level_that_needs_no_more_than_the_leanest_peer() -> None:
    levels = [
        ours("all", 16_384, 41_000.0, 18.0),
        ours("attention", 16_384, 35_000.0, 11.0),
        ours("input", 16_384, 31_000.0, 9.0),
    ]
    bounds = [line for line in across_cases([*levels, *PEERS]) if line["figure"].startswith("lean")]
    assert [line["measured"] for line in bounds] == [11.0, 1.458]
    assert all(line["pass"] for line in bounds)


def test_floors_count_only_where_everything_is_kept() -> None:
    found = holds([ours("input", 4096, 50_000.0, 8.0), ours("all", 4096, 47_000.0, 10.0)])
    assert not found["slice at 4096"]


def test_what_did_not_run_bounds_nothing() -> None:
    assert across_cases([]) == []
