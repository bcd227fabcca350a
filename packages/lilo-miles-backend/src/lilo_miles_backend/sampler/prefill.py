"""Prefill: prompts on their way into the batch, computed in a cache of their own.

A group of short prompts is one padded forward pass; a long prompt is a group of its own and takes several steps of at
most `CHUNK_TOKENS` tokens, so that running samples wait for one piece only, never for a whole prompt. Padding stands
after the last token of a row, where no token of that row looks. Jobs of a group with the same prompt and adapter share
a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from lilo_miles_backend.sampler.model import Model
from lilo_miles_backend.sampler.sequence import Job

CHUNK_TOKENS = 1024
"""Padded tokens of one prefill step."""
_LOGIT_ROWS = 256
"""Prompt positions whose logits are held at once."""


def take_group(waiting: deque[Job], max_rows: int, fits: Callable[[int, int], bool]) -> list[Job]:
    """Remove from the head of `waiting` the jobs whose prompts fit into one step, or are the same.

    Args:
        waiting: at least one.
        max_rows: most jobs.
        fits: whether there is memory for so many rows of such a length; if not for the first job, the group is empty.
    """
    longest = len(waiting[0].prompt)
    if not fits(1, longest):
        return []
    group = [waiting.popleft()]
    prompts, parts = {group[0].prefilled}, 1
    while waiting and len(group) < max_rows and not group[0].alone and not waiting[0].alone:
        job = waiting[0]
        if job.prefilled not in prompts or job.scores.wanted:
            # Scoring a prompt is work of its own, also where it is computed once.
            longest, parts = max(longest, len(job.prompt)), parts + 1
            rows = len(prompts | {job.prefilled})
            if longest * parts > CHUNK_TOKENS or not fits(rows, longest):
                break
            prompts.add(job.prefilled)
        group.append(waiting.popleft())
    return group


class Prefill:
    """The prompts of `jobs`, computed up to `position`."""

    def __init__(self, model: Model, jobs: list[Job]) -> None:
        """Allocates when the first step runs."""
        self.jobs = jobs
        prompts = {job.prefilled: job for job in jobs}
        self.row_of = {prompt: row for row, prompt in enumerate(prompts)}
        """Row of each prompt with its adapter, in the cache and the logits."""
        self.rows = [self.row_of[job.prefilled] for job in jobs]
        """Of each job."""
        self._distinct = list(prompts.values())
        """A job of each row."""
        self.position = 0
        self.length = max(len(job.prompt) for job in jobs)
        self.cache = model.new_cache(max_rows=len(prompts), max_length=self.length)
        self.last_logits_BV: torch.Tensor | None = None
        """Logits after the last prompt token, one row per distinct prompt; set when done."""
        self._model = model

    @property
    def done(self) -> bool:
        """Whether every prompt is in the cache."""
        return self.position >= self.length

    @property
    def size_bytes(self) -> int:
        """Of the cache and the logits."""
        logits = 0 if self.last_logits_BV is None else self.last_logits_BV.nbytes
        return self.cache.size_bytes + logits

    def forget_jobs(self) -> None:
        """Keep what was computed and not for whom."""
        self.jobs, self.rows, self._distinct = [], [], []

    def step(self) -> None:
        """Compute the next piece, and what was asked about the prompt there."""
        jobs = self._distinct
        end = min(self.length, self.position + max(1, CHUNK_TOKENS // len(jobs)))
        pieces = [job.prompt[self.position : end] for job in jobs]
        width = end - self.position
        device = self._model.base.device
        tokens_BT = torch.tensor([p + [0] * (width - len(p)) for p in pieces], device=device)
        self.cache.reserve(len(jobs), self.length)
        hidden_BTE = self._model.forward(
            tokens_BT,
            [self.position] * len(jobs),
            [len(piece) for piece in pieces],
            self.cache,
            [job.adapter for job in jobs],
        )
        for row, job in zip(self.rows, self.jobs, strict=True):
            if job.scores.wanted and not job.settled:
                self._score(job, hidden_BTE[row], end)
        self.position = end
        if self.done:
            self._finish(hidden_BTE, end - width)

    def _finish(self, hidden_BTE: torch.Tensor, start: int) -> None:
        # Only one prompt alone takes several steps, so every row's last token is in this piece.
        jobs, device = self._distinct, hidden_BTE.device
        last = torch.tensor([len(job.prompt) - 1 - start for job in jobs], device=device)
        rows = torch.arange(len(jobs), device=device)
        self.last_logits_BV = self._model.logits(
            hidden_BTE[rows, last], [job.adapter for job in jobs]
        )

    def _score(self, job: Job, hidden_TE: torch.Tensor, end: int) -> None:
        """What was asked about the tokens that follow the positions of this piece."""
        stop = min(end, len(job.prompt) - 1)
        for first in range(max(self.position, job.scores.first_row), stop, _LOGIT_ROWS):
            past = min(stop, first + _LOGIT_ROWS)
            part = hidden_TE[first - self.position : past - self.position]
            job.scores.fill(first, self._model.logits(part, [job.adapter] * (past - first)))
