"""Admission: which computed prompts start samples now, and how many each. Pure; `batch.py` acts on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lilo_miles_backend.sampler.cache import Cache
from lilo_miles_backend.sampler.prefill import Prefill
from lilo_miles_backend.sampler.sequence import Job


@dataclass(slots=True, eq=False)
class Ready:
    """A job whose prompt is computed, with samples that have not started."""

    job: Job
    prefill: Prefill
    row: int
    started: int = 0

    @property
    def left(self) -> int:
        """Samples that have not started."""
        return len(self.job.sequences) - self.started

    @property
    def needs_rows(self) -> bool:
        """What ends with its first token, or has none, needs no row."""
        return self.job.max_new > 1


def shares(
    ready: Iterable[Ready], *, live: int, longest: int, cache: Cache
) -> list[tuple[Ready, int]]:
    """How many samples each job starts now: equal shares of the free rows, in order.

    Args:
        ready: jobs, the one that is next first.
        live: rows that are taken.
        longest: positions of the longest of them at its end.
        cache: says for how many rows of a length there is memory.
    """
    chosen, free = _startable(ready, live, longest, cache)
    found = {id(entry): 0 if entry.needs_rows else entry.left for entry in chosen}
    hungry = [entry for entry in chosen if entry.needs_rows]
    while free and hungry:
        for entry in hungry[:free]:
            found[id(entry)] += 1
            free -= 1
        hungry = [entry for entry in hungry if found[id(entry)] < entry.left]
    return [(entry, found[id(entry)]) for entry in chosen if found[id(entry)]]


def _startable(
    ready: Iterable[Ready], live: int, longest: int, cache: Cache
) -> tuple[list[Ready], int]:
    """Jobs that may start samples, and the number of rows for all of them.

    All rows are as long as the longest of them will be, so that none runs out of memory half-way. A job that would need
    longer ones than there is room for holds back those behind it, or it would never start.
    """
    free = max(0, cache.rows_of(longest) - live)
    chosen: list[Ready] = []
    hungry, full = 0, False
    for entry in ready:
        if entry.needs_rows:
            length = max(longest, entry.job.length)
            rows = cache.rows_of(length) - live
            full = full or rows <= hungry
            if full:
                continue
            hungry, longest, free = hungry + 1, length, min(free, rows)
        chosen.append(entry)
    return chosen, free
