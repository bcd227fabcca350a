"""Sampling, native: the embedded engine as a server has it, without a server, called from a thread without an event loop.

Measured by `lilo bench sampler`. The engine's event loop runs in a thread of its own, as it runs in a process of its own
beside a server; seconds of this process have both, and the torch thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

import anyio
import anyio.from_thread
import numpy as np
from lilo_definitions import Definition
from lilo_engine.sampling.engine import SamplerConfig, SampleRequest, SampleResult, SamplingParams

from lilo_miles_backend.sampler.embedded import EmbeddedSampler


class NativeSampler:
    """One engine; a context manager."""

    def __init__(self, definition: Definition) -> None:
        """Nothing is loaded before the context begins."""
        self._definition = definition
        self._ids = itertools.count()
        self._portal = anyio.from_thread.start_blocking_portal()

    def __enter__(self) -> Self:
        """Read the base model."""
        portal = self._portal.__enter__()
        try:
            self._engine = portal.call(self._start)
        except BaseException as error:
            self._portal.__exit__(type(error), error, error.__traceback__)
            raise
        self._call = portal.call
        return self

    def __exit__(self, *_: object) -> None:
        """End the torch thread, then the loop."""
        try:
            self._call(self._engine.close)
        finally:
            self._portal.__exit__(None, None, None)

    async def _start(self) -> EmbeddedSampler:
        return EmbeddedSampler(SamplerConfig(definition=self._definition))

    def load(self, name: str, folder: str) -> None:
        """See `SamplingEngine.load`."""
        self._call(self._engine.load, name, folder)

    def unload(self, name: str) -> None:
        """See `SamplingEngine.unload`."""
        self._call(self._engine.unload, name)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        adapters: Sequence[str | None],
        num_samples: int = 1,
    ) -> list[SampleResult]:
        """A request of each prompt, all sent at once; returns when all have their answers.

        Args:
            prompts: token ids.
            new_tokens: of each sample, whatever they are: nothing ends a sample early.
            adapters: one for each prompt; None: the base model.
            num_samples: of each prompt.
        """
        requests = [
            self._request(prompt, adapter, new_tokens, num_samples)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        return self._call(self._answers, requests)

    def logprobs(self, prompt: Sequence[int], adapter: str) -> np.ndarray:
        """Log-probability of every token of a prompt but the first, float32."""
        request = self._request(prompt, adapter, 1, 1, prompt_logprobs=True)
        (answer,) = self._call(self._answers, [request])
        assert answer.prompt_logprobs is not None
        return np.frombuffer(answer.prompt_logprobs, dtype="<f4")[1:]

    async def _answers(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        answers: dict[str, SampleResult] = {}

        async def answer(request: SampleRequest) -> None:
            answers[request.request_id] = await self._engine.sample(request)

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(answer, request)
        return [answers[request.request_id] for request in requests]

    def _request(
        self,
        prompt: Sequence[int],
        adapter: str | None,
        new_tokens: int,
        num_samples: int,
        *,
        prompt_logprobs: bool = False,
    ) -> SampleRequest:
        return SampleRequest(
            request_id=str(next(self._ids)),
            prompt=np.asarray(prompt, dtype="<i4").tobytes(),
            num_samples=num_samples,
            params=SamplingParams(max_tokens=new_tokens),
            adapter=adapter,
            prompt_logprobs=prompt_logprobs,
        )
