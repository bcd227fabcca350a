"""Batch: which samples generate together, step by step (continuous admission).

    prompts (own caches) -> ready jobs -> live rows -> answers

A step computes one piece of prefill, gives free rows to samples of ready jobs, and draws one token for every live row.
All samples of a job start from one prefill; a job with more samples than there are rows is served in waves, while
others get their share of the rows. Nothing here knows threads, bytes or names: `worker.py` calls it from the torch thread.

Invariant: live row i is row i of the cache. When a row ends, the last one moves into its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch
from lilo_engine.errors import CommandFailed, LiloError

from lilo_miles_backend.sampler import logprobs
from lilo_miles_backend.sampler.adapters import Adapter
from lilo_miles_backend.sampler.admission import Ready, shares
from lilo_miles_backend.sampler.draw import draw_tokens
from lilo_miles_backend.sampler.model import Model
from lilo_miles_backend.sampler.prompts import Prompts
from lilo_miles_backend.sampler.sequence import Job, Sequence

_KEEP_IDLE_BYTES = 64 * 2**20
"""Cache that an idle sampler keeps, to be quick when work comes."""

Begun: TypeAlias = tuple[Ready, list[Sequence]]
"""A job with those of its samples that start now."""

_log = logging.getLogger(__name__)


class Batch:
    """The jobs of one sampler."""

    def __init__(
        self, model: Model, *, max_rows: int, max_length: int, cache_bytes: int | None = None
    ) -> None:
        """Nothing runs and nothing is allocated yet.

        Args:
            model: what computes.
            max_rows: samples that generate at once.
            max_length: the context.
            cache_bytes: for the caches of rows and of computed prompts together; None: no limit but the above.
        """
        self.generated_tokens = 0
        self._model = model
        self._max_rows = max_rows
        self._cache = model.new_cache(max_rows=max_rows, max_length=max_length)
        self._limited = cache_bytes is not None
        prompt_bytes: int | None = None
        if cache_bytes is not None:
            # Prompts get a quarter, and room for a whole one: rows and prompts never wait for each other's memory.
            prompt_bytes = max(cache_bytes // 4, self._cache.bytes_of(1, max_length))
            rest = max(0, cache_bytes - prompt_bytes)
            self._cache = model.new_cache(
                max_rows=max_rows, max_length=max_length, limit_bytes=rest
            )
        self._prompts = Prompts(
            model, max_rows=max_rows, bytes_of=self._cache.bytes_of, limit_bytes=prompt_bytes
        )
        self._live: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._prompts.busy or bool(self._live)

    @property
    def num_running(self) -> int:
        """Jobs with at least one live sample."""
        return len({id(sequence.job) for sequence in self._live})

    @property
    def num_waiting(self) -> int:
        """Jobs whose prompt is not computed yet, or which have no live sample yet."""
        return self._prompts.num_waiting

    @property
    def held_bytes(self) -> int:
        """Of the caches of rows, and of prompts that are computed or being computed."""
        return self._cache.size_bytes + self._prompts.held_bytes

    def submit(self, job: Job) -> None:
        """Take a job; its answer comes out of a later step."""
        self._prompts.submit(job)

    def abort(self, unwanted: Callable[[Job], bool], error: LiloError) -> None:
        """Fail jobs wherever they are and free their rows."""
        for job in self._jobs():
            if unwanted(job):
                job.fail(error)
        self._prompts.drop_settled(waiting=True)
        self._drop_settled()

    def forget_adapter(self, adapter: Adapter) -> None:
        """Keep nothing for later jobs of an adapter; those that are here go on with it."""
        self._prompts.forget_adapter(adapter)

    def fail_all(self, error: LiloError) -> None:
        """Fail every job and start from nothing."""
        for job in self._jobs():
            job.fail(error)
        self._prompts.clear()
        self._live.clear()
        self._cache.release()

    def step(self) -> None:
        """One round of prefill, admission and decoding."""
        self._prompts.step()
        self._start_samples()
        self._decode()
        if not self.busy:
            self._prompts.forget_recent()
            if self._cache.size_bytes > _KEEP_IDLE_BYTES:
                self._cache.release()

    def _jobs(self) -> list[Job]:
        return [*self._prompts.jobs, *{s.job: None for s in self._live}]

    # ---- admission

    def _start_samples(self) -> None:
        """Give free rows to ready jobs; a job that has more samples to start goes to the end of the queue."""
        started = shares(
            self._prompts.ready, live=len(self._live), longest=self._longest, cache=self._cache
        )
        together: list[Begun] = []
        for ready, count in started:
            self._prompts.ready.remove(ready)
            begun = (ready, ready.job.sequences[ready.started : ready.started + count])
            ready.started += count
            if ready.needs_rows:
                together.append(begun)
            else:
                # May have more samples than there are rows, so these logits are never held beside others'.
                self._start([begun])
        self._start(together)
        self._prompts.ready.extend(
            ready for ready, _ in started if ready.left and not ready.job.settled
        )

    @property
    def _longest(self) -> int:
        """Positions of the longest live row at its end."""
        return max((sequence.job.length for sequence in self._live), default=0)

    def _start(self, begun: list[Begun]) -> None:
        """Draw the first tokens of these samples at once, and make rows of those that go on."""
        try:
            self._draw_first(begun)
        except Exception as error:  # no memory for the logits, say
            for ready, _ in begun:
                self._fail_start(ready.job, error)
        for ready, sequences in begun:
            try:
                self._enter(ready, sequences)
            except Exception as error:  # no memory for its rows, say: it alone fails
                self._fail_start(ready.job, error)

    def _draw_first(self, begun: list[Begun]) -> None:
        drawn = [(ready, some) for ready, some in begun if ready.job.max_new > 0]
        if not drawn:
            return
        logits: list[torch.Tensor] = []
        for ready, sequences in drawn:
            assert ready.prefill.last_logits_BV is not None
            logits.append(ready.prefill.last_logits_BV[ready.row].expand(len(sequences), -1))
        self._append(
            [sequence for _, some in drawn for sequence in some],
            logits[0] if len(logits) == 1 else torch.cat(logits),
        )

    def _enter(self, ready: Ready, sequences: list[Sequence]) -> None:
        job = ready.job
        job.settle_if_ended()
        for sequence in sequences:
            if sequence.ended is None and not job.settled:
                row = len(self._live)
                self._cache.reserve(row + 1, self._needed(job))
                self._cache.copy_from(ready.prefill.cache, ready.row, row, len(job.prompt))
                self._live.append(sequence)

    def _fail_start(self, job: Job, error: Exception) -> None:
        _log.error("starting %s failed", job.request.request_id, exc_info=error)
        job.fail(CommandFailed(f"the sampler failed to start this request: {error}"))

    def _needed(self, job: Job) -> int:
        """Positions to reserve for a row: to its end where memory is counted, else as it grows."""
        return max(self._longest, job.length) if self._limited else len(job.prompt)

    # ---- decoding

    def _decode(self) -> None:
        """Draw one token for every live row."""
        if not self._live:
            return
        device = self._model.base.device
        tokens_BT = torch.tensor([[s.tokens[-1]] for s in self._live], device=device)
        starts = [sequence.next_position for sequence in self._live]
        adapters = [sequence.job.adapter for sequence in self._live]
        ones = [1] * len(starts)
        hidden_BTE = self._model.forward(tokens_BT, starts, ones, self._cache, adapters)
        self._append(self._live, self._model.logits(hidden_BTE[:, 0], adapters))
        for sequence in self._live:
            if sequence.ended is not None:
                sequence.job.settle_if_ended()
        self._drop_settled()

    def _append(self, sequences: list[Sequence], logits_BV: torch.Tensor) -> None:
        """Draw from each row of logits; a row that is not finite fails its job and no other."""
        finite = logits_BV.amax(dim=-1).isfinite()
        if not bool(finite.all()):
            for sequence, good in zip(sequences, finite.tolist(), strict=True):
                if not good:
                    sequence.job.fail(CommandFailed("the logits of this request are not finite"))
            logits_BV = torch.where(finite[:, None], logits_BV, 0.0)
        values_BV = logits_BV.log_softmax(dim=-1)
        tokens = draw_tokens(logits_BV, [sequence.draw for sequence in sequences])
        chosen = logprobs.of_tokens(values_BV, tokens)
        for row, sequence in enumerate(sequences):
            if sequence.topk is not None:
                ids, tops = logprobs.most_likely(values_BV[row : row + 1], sequence.topk.k)
                sequence.topk.add(ids[0], tops[0])
            sequence.append(tokens[row], chosen[row])
        self.generated_tokens += len(sequences)

    def _drop_settled(self) -> None:
        """Free the rows of samples that ended, and of jobs that were failed; from the last row down."""
        for row in range(len(self._live) - 1, -1, -1):
            sequence = self._live[row]
            failed = sequence.job.settled and sequence.ended is None
            if sequence.ended is None and not failed:
                continue
            self._cache.clear(row)
            last = self._live.pop()
            if last is not sequence:
                self._cache.copy_from(self._cache, len(self._live), row, last.next_position)
                self._live[row] = last
        self._prompts.drop_settled(waiting=False)
