"""Job and Sequence: one request inside the batch, and each sample of it while it grows.

They hold state and decide when a sample ends; `batch.py` decides when they run. Only the torch thread touches them
after they were submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from lilo_engine.errors import LiloError
from lilo_engine.sampling.engine import SampledSequence, SampleRequest, SampleResult

from lilo_miles_backend.sampler.adapters import Adapter
from lilo_miles_backend.sampler.draw import Draw, stream
from lilo_miles_backend.sampler.logprobs import TopKRows
from lilo_miles_backend.sampler.prompt import PromptScores
from lilo_miles_backend.sampler.text import StopStrings

StopReason: TypeAlias = Literal["stop", "length"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample."""

    job: Job
    draw: Draw
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    topk: TopKRows | None = None
    ended: StopReason | None = None

    def append(self, token: int, logprob: float) -> None:
        """Take a drawn token and see whether it was the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.ended = self.job.verdict(self.tokens)

    @property
    def next_position(self) -> int:
        """Where the newest token stands; everything before it is in the cache."""
        return len(self.job.prompt) + len(self.tokens) - 1

    def freeze(self) -> SampledSequence:
        """As the contract has it; `ended` must be set."""
        assert self.ended is not None
        return SampledSequence(
            tokens=np.asarray(self.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(self.logprobs, dtype="<f4").tobytes(),
            stop_reason=self.ended,
            topk=self.topk.freeze() if self.topk is not None else None,
        )


@dataclass(slots=True, eq=False)
class Job:
    """One request from submission until its answer was handed over."""

    request: SampleRequest
    prompt: list[int]
    adapter: Adapter | None
    """The adapter itself, not its name: forgetting the name changes nothing for this job."""
    max_new: int
    """Tokens to generate at most: what was asked for, cut where the context ends."""
    stop_strings: StopStrings | None
    deliver: Callable[[SampleResult | LiloError], None]
    """Called once, in the torch thread."""
    sequences: list[Sequence] = field(default_factory=list[Sequence])
    scores: PromptScores = field(init=False)
    """What was asked about the prompt itself."""
    alone: bool = False
    """Prefilled by itself, because it was in a group that failed."""
    settled: bool = False

    def __post_init__(self) -> None:
        """Make the samples and the tables that were asked for."""
        request, params = self.request, self.request.params
        for sample in range(request.num_samples):
            draw = Draw(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                stream=stream(params.seed, sample),
            )
            k = request.topk_sample_logprobs
            self.sequences.append(Sequence(self, draw, topk=TopKRows(k) if k else None))
        self.scores = PromptScores(request, self.prompt)
        if self.max_new == 0:
            for sequence in self.sequences:
                sequence.ended = "length"

    @property
    def prefilled(self) -> tuple[bytes, Adapter | None]:
        """All that its prefill depends on: jobs in which this is equal share one row of it."""
        return self.request.prompt, self.adapter

    @property
    def length(self) -> int:
        """Positions of a row of this job at its longest; the last token that is drawn is never fed."""
        return len(self.prompt) + max(0, self.max_new - 1)

    def verdict(self, tokens: list[int]) -> StopReason | None:
        """Whether a sample with these tokens has ended, and why."""
        if tokens[-1] in self.request.params.stop_tokens:
            return "stop"
        if self.stop_strings is not None and self.stop_strings.reached(tokens):
            return "stop"
        return "length" if len(tokens) >= self.max_new else None

    def settle_if_ended(self) -> None:
        """Hand the result over once every sample has ended."""
        if self.settled or any(sequence.ended is None for sequence in self.sequences):
            return
        self._settle(
            SampleResult(
                sequences=tuple(sequence.freeze() for sequence in self.sequences),
                prompt_logprobs=self.scores.logprobs(),
                topk_prompt=self.scores.topk(),
                target_scores=self.scores.targets(),
                alt_tokens=self.scores.alternatives(),
            )
        )

    def fail(self, error: LiloError) -> None:
        """Hand an error over instead; rows that are still live are dropped by the batch."""
        if not self.settled:
            self._settle(error)

    def _settle(self, outcome: SampleResult | LiloError) -> None:
        self.settled = True
        self.deliver(outcome)
