"""Prompts: jobs on their way from submission to a computed prompt.

    waiting jobs -> one group's prefill -> ready jobs, which wait for rows

What was computed a moment ago is kept while there is work: a client that asks for sixteen samples of one prompt in
sixteen requests has them arrive one by one, and only the first is computed. `batch.py` takes ready jobs away. Nothing is
drawn here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from lilo_engine.errors import CommandFailed

from lilo_miles_backend.sampler.adapters import Adapter
from lilo_miles_backend.sampler.admission import Ready
from lilo_miles_backend.sampler.model import Model
from lilo_miles_backend.sampler.prefill import Prefill, take_group
from lilo_miles_backend.sampler.sequence import Job

_MAX_READY = 16
"""Jobs with computed prompts that wait for rows; each holds the cache of its prompt."""
_MAX_RECENT = 8
"""Groups whose prompts are kept for jobs that come later."""
_RECENT_BYTES = 32 * 2**20
"""Of all of them; where memory for prompts is limited, an eighth of it if that is less."""

_log = logging.getLogger(__name__)


class Prompts:
    """Jobs without rows."""

    def __init__(
        self,
        model: Model,
        *,
        max_rows: int,
        bytes_of: Callable[[int, int], int],
        limit_bytes: int | None,
    ) -> None:
        """Nothing waits.

        Args:
            model: what computes.
            max_rows: most prompts of a group.
            bytes_of: of a cache with so many rows of so many positions.
            limit_bytes: for all prompts that are computed or being computed; one always is. None: no limit.
        """
        self.ready: deque[Ready] = deque()
        self._model = model
        self._max_rows = max_rows
        self._bytes_of = bytes_of
        self._limit_bytes = limit_bytes
        self._waiting: deque[Job] = deque()
        self._prefill: Prefill | None = None
        self._recent: deque[Prefill] = deque()
        """The newest last."""

    @property
    def busy(self) -> bool:
        """Whether any job is here."""
        return bool(self._waiting or self._prefill or self.ready)

    @property
    def jobs(self) -> list[Job]:
        """All of them."""
        prefilling = self._prefill.jobs if self._prefill is not None else []
        return [*self._waiting, *prefilling, *(entry.job for entry in self.ready)]

    @property
    def num_waiting(self) -> int:
        """Jobs whose prompt is not computed yet, or of which no sample has started."""
        prefilling = len(self._prefill.jobs) if self._prefill is not None else 0
        return len(self._waiting) + prefilling + sum(entry.started == 0 for entry in self.ready)

    @property
    def held_bytes(self) -> int:
        """Of prompts that are computed or being computed, with their logits; a group's prompts share a cache."""
        prefills = [*self._recent, *(entry.prefill for entry in self.ready)]
        if self._prefill is not None:
            prefills.append(self._prefill)
        return sum({id(prefill): prefill.size_bytes for prefill in prefills}.values())

    def submit(self, job: Job) -> None:
        """Take a job."""
        self._waiting.append(job)

    def drop_settled(self, *, waiting: bool) -> None:
        """Let go of jobs that have their answer; a group that is being computed goes on.

        Args:
            waiting: look at those without a computed prompt too, which may be many: only an abort settles them.
        """
        self.ready = deque(entry for entry in self.ready if not entry.job.settled)
        if waiting:
            self._waiting = deque(job for job in self._waiting if not job.settled)

    def clear(self) -> None:
        """Let go of everything."""
        self._waiting.clear()
        self.ready.clear()
        self._recent.clear()
        self._prefill = None

    def forget_recent(self) -> None:
        """Let go of what no job here needs."""
        self._recent.clear()

    def forget_adapter(self, adapter: Adapter) -> None:
        """Let go of recent prompts of an adapter that no later job has, and so of the adapter."""
        self._recent = deque(
            one for one in self._recent if all(its is not adapter for _, its in one.row_of)
        )

    def step(self) -> None:
        """Compute a piece; a failing group is tried again one job at a time, so that one cannot fail others."""
        self._take_recent()
        if self._prefill is None:
            if not self._waiting or len(self.ready) >= _MAX_READY:
                return
            group = take_group(self._waiting, self._max_rows, self._fits)
            if not group:
                return
            self._prefill = Prefill(self._model, group)
        prefill = self._prefill
        try:
            prefill.step()
        except (RuntimeError, ValueError, MemoryError) as error:
            self._prefill = None
            self._retry_alone(prefill.jobs, error)
            return
        if prefill.done:
            self._prefill = None
            self.ready.extend(
                Ready(job, prefill, row)
                for row, job in zip(prefill.rows, prefill.jobs, strict=True)
                if not job.settled
            )
            self._keep(prefill)

    def _take_recent(self) -> None:
        """Jobs at the head of the line whose prompts are there; the line keeps its order."""
        while self._waiting and not self._waiting[0].scores.wanted:
            key = self._waiting[0].prefilled
            prefill = next((one for one in self._recent if key in one.row_of), None)
            if prefill is None:
                return
            self.ready.append(Ready(self._waiting.popleft(), prefill, prefill.row_of[key]))

    def _keep(self, prefill: Prefill) -> None:
        prefill.forget_jobs()
        self._recent.append(prefill)
        limit = _RECENT_BYTES
        if self._limit_bytes is not None:
            limit = min(limit, self._limit_bytes // 8)
        while self._recent and (
            len(self._recent) > _MAX_RECENT or sum(one.size_bytes for one in self._recent) > limit
        ):
            self._recent.popleft()

    def _fits(self, rows: int, length: int) -> bool:
        """Whether these prompts fit beside those that wait for rows; when none waits, one always does."""
        if self._limit_bytes is None:
            return True
        more = self._bytes_of(rows, length)
        while self._recent and self.held_bytes + more > self._limit_bytes:
            self._recent.popleft()
        return (rows == 1 and not self.ready) or self.held_bytes + more <= self._limit_bytes

    def _retry_alone(self, jobs: list[Job], error: Exception) -> None:
        if len(jobs) == 1:
            _log.error("prefill of %s failed", jobs[0].request.request_id, exc_info=error)
            jobs[0].fail(CommandFailed(f"the sampler failed on this prompt: {error}"))
            return
        for job in jobs:
            job.alone = True
        self._waiting.extendleft(reversed([job for job in jobs if not job.settled]))
