"""MemorySamplingEngine: a deterministic language model without weights. For tests of everything above an engine.

The next-token distribution is a function of the adapter's files and the last few tokens, drawn from a seeded
generator. It honours what the protocol promises (seeds, stops, greedy, top-k, top-p, logprobs, adapters by name), so a
test against it means the same against a real engine. It is no model of anything and generates nonsense.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from lilo_engine.errors import Gone, InvalidRequest, NotFound, ServerError, Unavailable
from lilo_engine.sampling.engine import (
    AltTokens,
    SampledSequence,
    SamplerConfig,
    SampleRequest,
    SampleResult,
    SamplerHealth,
    SamplerInfo,
    SamplingParams,
    TargetScores,
    TopK,
)
from lilo_engine.sampling.validate import check_request

_MEMORY_TOKENS = 4
"""How far back the distribution looks."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_STEPS_PER_TURN = 32
"""Tokens between two turns of the event loop, so that aborts and other requests get in."""

_Logits = npt.NDArray[np.float64]


class MemorySamplingEngine:
    """Implements `SamplingEngine` in this process."""

    def __init__(self, config: SamplerConfig) -> None:
        """Take the vocabulary and the limits from the definition; nothing is loaded."""
        definition = config.definition
        self._context = definition.context
        self._adapters: dict[str, tuple[str, str]] = {}
        self._running: dict[str, anyio.CancelScope] = {}
        self._closed = False
        self._generated = 0
        self._info = SamplerInfo(
            base_model=definition.model.name,
            vocab_size=definition.model.vocab_size,
            max_context=definition.context,
            eos_tokens=(definition.model.vocab_size - 1,),
            stop_strings=False,
            max_adapters=definition.sampler.max_adapters,
            device="memory",
            pid=os.getpid(),
        )

    async def load(self, name: str, folder: str) -> None:
        """The adapter is the digest of its files: equal files give equal numbers, others do not."""
        held = self._adapters.get(name)
        if held is not None:
            if held[0] != folder:
                raise InvalidRequest(f"adapter {name!r} is {held[0]}; names are immutable")
            return
        if len(self._adapters) >= self._info.max_adapters:
            raise ServerError(f"{len(self._adapters)} adapters are loaded, which is the limit")
        digest = hashlib.sha256()
        for file in _FILES:
            try:
                # In-memory engine of tests: the files are small and local.
                digest.update(Path(folder, file).read_bytes())  # noqa: ASYNC240
            except OSError as error:
                raise InvalidRequest(f"{folder} is no adapter folder: {error}") from error
        self._adapters[name] = (folder, digest.hexdigest())

    async def unload(self, name: str) -> None:
        """Running requests go on: they hold the digest."""
        self._adapters.pop(name, None)

    async def sample(self, request: SampleRequest) -> SampleResult:
        """See `SamplingEngine`."""
        if self._closed:
            raise Unavailable("the sampler is closed; try again when it is back")
        check_request(request, vocab_size=self._info.vocab_size, context=self._context)
        if request.params.stop_strings:
            raise InvalidRequest("this engine has no tokenizer; use stop token ids")
        scope = anyio.CancelScope()
        self._running[request.request_id] = scope
        result: SampleResult | None = None
        try:
            with scope:
                result = await self._generate(request, self._digest(request.adapter))
        finally:
            del self._running[request.request_id]
        if result is None and self._closed:
            raise Unavailable("the sampler was closed; try again when it is back")
        if result is None:
            raise Gone(f"request {request.request_id} was aborted; send it again to sample")
        return result

    async def abort(self, request_id: str) -> None:
        """See `SamplingEngine`."""
        scope = self._running.get(request_id)
        if scope is not None:
            scope.cancel()

    async def health(self) -> SamplerHealth:
        """See `SamplingEngine`."""
        return SamplerHealth(
            running=len(self._running), waiting=0, generated_tokens=self._generated, age_s=0.0
        )

    async def info(self) -> SamplerInfo:
        """See `SamplingEngine`."""
        return self._info

    async def close(self) -> None:
        """Fail what runs."""
        self._closed = True
        for scope in self._running.values():
            scope.cancel()

    def _digest(self, adapter: str | None) -> str:
        if adapter is None:
            return "base"
        if adapter not in self._adapters:
            raise NotFound(f"adapter {adapter!r} is not loaded in this sampler")
        return self._adapters[adapter][1]

    async def _generate(self, request: SampleRequest, digest: str) -> SampleResult:
        prompt: list[int] = np.frombuffer(request.prompt, dtype="<i4").tolist()
        sequences = [
            await self._sequence(request, digest, prompt, sample)
            for sample in range(request.num_samples)
        ]
        about = bool(request.prompt_alt_tokens_k or request.prompt_targets)
        wanted = request.prompt_logprobs or request.topk_prompt_logprobs or about
        rows = [self._logprobs(digest, prompt[:i]) for i in range(1, len(prompt))] if wanted else []
        # Row i is about prompt token i + 1; the first has none.
        begin = max(0, len(rows) - (request.prompt_logprobs_last_n or len(rows)))
        tail = rows[begin:]
        scored = [*[None] * (len(prompt) - len(tail)), *tail]
        values = [
            float("nan") if row is None else row[token]
            for row, token in zip(scored, prompt, strict=True)
        ]
        k = request.topk_prompt_logprobs
        return SampleResult(
            sequences=tuple(sequences),
            prompt_logprobs=_floats(values) if request.prompt_logprobs else None,
            topk_prompt=_top_k(scored, k) if k else None,
            target_scores=_targets(rows, request),
            alt_tokens=_alternatives(rows, request),
        )

    async def _sequence(
        self, request: SampleRequest, digest: str, prompt: list[int], sample: int
    ) -> SampledSequence:
        params = request.params
        stream = random.Random(None if params.seed is None else str(params.seed + sample))
        tokens: list[int] = []
        rows: list[_Logits] = []
        stopped = False
        limit = min(params.max_tokens, self._context - len(prompt) + 1)
        while len(tokens) < limit and not stopped:
            if len(tokens) % _STEPS_PER_TURN == 0:
                await anyio.lowlevel.checkpoint()
            rows.append(self._logprobs(digest, [*prompt[-_MEMORY_TOKENS:], *tokens]))
            tokens.append(_draw(rows[-1], params, stream))
            self._generated += 1
            stopped = tokens[-1] in params.stop_tokens
        k = request.topk_sample_logprobs
        return SampledSequence(
            tokens=np.asarray(tokens, dtype="<i4").tobytes(),
            logprobs=_floats([row[token] for row, token in zip(rows, tokens, strict=True)]),
            stop_reason="stop" if stopped else "length",
            topk=_top_k(rows, k) if k else None,
        )

    def _logprobs(self, digest: str, tokens: Sequence[int]) -> _Logits:
        """Log-probabilities of the next token, float64 [vocab_size]."""
        text = f"{digest}:{list(tokens[-_MEMORY_TOKENS:])}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        logits = np.random.default_rng(seed).normal(scale=2.0, size=self._info.vocab_size)
        return logits - np.logaddexp.reduce(logits)


def _draw(logprobs: _Logits, params: SamplingParams, stream: random.Random) -> int:
    """Temperature, then top-k, then top-p; one random number per token."""
    if params.temperature == 0:
        return int(logprobs.argmax())
    weights = np.exp((logprobs - logprobs.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: params.top_k] if params.top_k > 0 else order
    before = np.cumsum(weights[kept]) - weights[kept]
    kept = kept[(before < params.top_p * weights[kept].sum()) | (np.arange(kept.size) == 0)]
    total = np.cumsum(weights[kept])
    return int(kept[np.searchsorted(total, stream.random() * total[-1], side="right")])


def _targets(rows: Sequence[_Logits], request: SampleRequest) -> TargetScores | None:
    targets = request.prompt_targets
    if targets is None:
        return None
    places = np.frombuffer(targets.rows, dtype="<i4").tolist()
    ids = np.frombuffer(targets.token_ids, dtype="<i4").tolist()
    values: list[Any] = []
    for row, token in zip(places, ids, strict=True):
        values.append(rows[row][token] if token >= 0 else 0.0)
    return TargetScores(layout=targets.layout, logprobs=_floats(values))


def _alternatives(rows: Sequence[_Logits], request: SampleRequest) -> AltTokens | None:
    k, seed = request.prompt_alt_tokens_k, request.params.seed
    if not k:
        return None
    params = SamplingParams(max_tokens=1, temperature=request.params.temperature)
    ids = np.zeros((len(rows), k), dtype="<i4")
    for place, row in enumerate(rows):
        stream = random.Random(None if seed is None else f"alternatives {seed} {place}")
        ids[place] = [_draw(row, params, stream) for _ in range(k)]
    values = [row[ids[place]] for place, row in enumerate(rows)]
    return AltTokens(k=k, length=len(rows), token_ids=ids.tobytes(), logprobs=_floats(values))


def _floats(values: Sequence[Any]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def _top_k(rows: Sequence[_Logits | None], k: int) -> TopK:
    """The k most likely tokens of each row; None is a position without a distribution."""
    ids = np.zeros((len(rows), k), dtype="<i4")
    values = np.full((len(rows), k), -99999.0, dtype="<f4")
    for place, row in enumerate(rows):
        if row is not None:
            top = np.argsort(-row, kind="stable")[:k]
            ids[place, : top.size] = top
            values[place, : top.size] = row[top]
    return TopK(k=k, length=len(rows), token_ids=ids.tobytes(), logprobs=values.tobytes())
