"""Modes: what a medium with a view per container may do, where its maker does not say, or says "may".

A publisher must be right under all of them. The defaults are the kind ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """How an emulated volume behaves. Rules (R1-R23) are those of `README.md` beside this file."""

    commit_reload: Literal["off", "on"] = "off"
    """On: a commit reloads the view in the same call, and raises if it cannot, after it was applied (R4)."""
    reload_dirty: Literal["commit", "drop"] = "commit"
    """What a reload does with writes that were not committed (R6)."""
    open_write: Literal["hide", "prefix"] = "hide"
    """What a commit publishes of a file that is open for writing: nothing, or the bytes so far (R9)."""
    commit_atomic: bool = True
    """Whether a commit appears at once, or path by path (R10)."""
    commit_order: Literal["sorted", "shuffled"] = "sorted"
    """Of the paths of a commit that is not atomic; shuffled by `seed`, as is where `rpc_faults="mid"` stops."""
    background: Literal["off", "random", "adversarial"] = "off"
    """Commits that nobody called for: never, at random, or before every call (R8)."""
    rpc_faults: Literal["none", "before", "after", "mid"] = "none"
    """Every call fails once, before, after, or in the middle of being applied, and works when repeated (R15)."""
    cold_reads_fail: bool = False
    """Whether what was removed on the server, and is not open, can no longer be read in a view (R18)."""
    copy_partial: bool = True
    """Whether earlier sources of a copy stay when a later one is missing (R13)."""
    version: Literal[1, 2] = 2
    """1: no recursive copies and no hard links (R13, R20), at most 500,000 files (R17)."""
    reload_window_s: float = 0.0
    """How long the view is empty while it reloads (R7)."""
    latency_s: float = 0.0
    """Of every call to the server (R16)."""
    max_concurrent_commits: int = 5
    """More than this wait for each other (R16)."""
    quota_bytes: int | None = None
    max_files: int | None = None
    max_folder_entries: int | None = 262_144
    max_file_bytes: int = 1 << 40
    """More than these is refused when it is committed (R17); a real volume may refuse it when it is written."""
    seed: int = 0
    """Of random background commits, and of the order of listings; 0 sorts listings (R21)."""


SWEPT: Mapping[str, tuple[Any, ...]] = {
    "commit_reload": ("off", "on"),
    "reload_dirty": ("commit", "drop"),
    "open_write": ("hide", "prefix"),
    "commit_atomic": (True, False),
    "background": ("off", "random", "adversarial"),
    "rpc_faults": ("none", "before", "after", "mid"),
    "cold_reads_fail": (False, True),
}
"""The modes that a publisher must be right under, with all their values."""


_Pair: TypeAlias = tuple[int, int, int, int]


def every(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations of values."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations, in which every two values of two axes meet at least once. Greedy, deterministic."""
    names = list(axes)
    candidates = list(itertools.product(*(range(len(axes[name])) for name in names)))
    pairs = [_pairs(row) for row in candidates]
    left = set[_Pair]().union(*pairs)
    rows: list[dict[str, Any]] = []
    while left:
        gains = [len(some & left) for some in pairs]
        best = gains.index(max(gains))
        left -= pairs[best]
        row = candidates[best]
        rows.append({name: axes[name][index] for name, index in zip(names, row, strict=True)})
    return rows


def _pairs(row: tuple[int, ...]) -> set[_Pair]:
    """Every two axes of a row, with their values."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
