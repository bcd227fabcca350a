"""SamplingEngine: the protocol between the sampling manager and whatever generates tokens.

Above it stands `sampling/manager.py`; below it the embedded sampler in a process of its own, reached through
`sampling/remote.py`, or `sampling/memory.py` for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from lilo_definitions import Definition

UNUSED_LOGPROB = -99999.0
"""Of a cell without a token, as the wire has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 = greedy."""
    top_k: int = -1
    """-1 = all."""
    top_p: float = 1.0
    seed: int | None = None
    """Sample j of a request draws from seed + j; None: from entropy."""
    stop_tokens: tuple[int, ...] = ()
    """Generation ends with, and includes, any of these."""
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLayout:
    """How the cells of a table with one row per predicted prompt token lie: dense, or sparse as CSR."""

    length: int
    """Rows: row i is about prompt token i + 1."""
    width: int
    crow: bytes | None = None
    """int64 [length + 1]; None = dense, row-major, length x width."""
    col: bytes | None = None
    """int64, one per cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTargets:
    """Token ids whose log-probabilities are wanted at places of the prompt."""

    layout: CellLayout
    rows: bytes
    """int32, the row of each cell, ascending."""
    token_ids: bytes
    """int32, one per cell; -1 asks for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One prompt and the samples wanted of it."""

    request_id: str
    prompt: bytes
    """int32 little-endian token ids."""
    num_samples: int
    params: SamplingParams
    adapter: str | None
    """Name given to `load`; None = the base model."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    """Score only so many tokens at the end of the prompt, top-k included; None = all."""
    prompt_alt_tokens_k: int = 0
    """Draws wanted at each prompt position after the first."""
    prompt_targets: PromptTargets | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetScores:
    """Answers `PromptTargets`, cell by cell."""

    layout: CellLayout
    logprobs: bytes
    """float32, one per cell; 0 where nothing was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AltTokens:
    """Independent draws at the request's temperature, row i in place of prompt token i + 1; row-major length x k."""

    k: int
    length: int
    token_ids: bytes
    """int32."""
    logprobs: bytes
    """float32: under the untempered model distribution, as all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The k most likely tokens at each of `length` positions, row-major length x k."""

    k: int
    length: int
    token_ids: bytes
    """int32; an unused cell is 0."""
    logprobs: bytes
    """float32; an unused cell is -99999."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sample, stop token included."""

    tokens: bytes
    """int32 little-endian, shape [n]."""
    logprobs: bytes
    """float32 little-endian, shape [n]: log-probabilities under the untempered model distribution."""
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """All samples of one request."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: bytes | None = None
    """float32, one per prompt token; NaN where it was not computed, and for the first."""
    topk_prompt: TopK | None = None
    target_scores: TargetScores | None = None
    alt_tokens: AltTokens | None = None

    @property
    def size_bytes(self) -> int:
        """About what its protobuf body takes, without building it."""
        size = len(self.prompt_logprobs or b"") + _topk_bytes(self.topk_prompt)
        if self.target_scores is not None:
            size += len(self.target_scores.logprobs)
        if self.alt_tokens is not None:
            # On the wire its tokens are int64.
            size += 3 * len(self.alt_tokens.logprobs)
        for sequence in self.sequences:
            size += len(sequence.tokens) + len(sequence.logprobs) + _topk_bytes(sequence.topk) + 16
        return size


def _topk_bytes(topk: TopK | None) -> int:
    return 0 if topk is None else len(topk.token_ids) + len(topk.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    """What a sampling engine can do."""

    base_model: str
    vocab_size: int
    max_context: int
    eos_tokens: tuple[int, ...]
    stop_strings: bool
    """Whether it has a tokenizer."""
    max_adapters: int
    device: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerHealth:
    """Progress of a sampling engine."""

    running: int
    waiting: int
    generated_tokens: int
    age_s: float
    """Seconds since it last generated or admitted anything while there was work; 0 when idle."""


class SamplingEngine(Protocol):
    """Answers `asample` with the base model or any loaded adapter."""

    async def load(self, name: str, folder: str) -> None:
        """Load a PEFT folder under an immutable name; the same pair again does nothing.

        Raises:
            UserError: the folder is no adapter for this base model.
        """
        ...

    async def unload(self, name: str) -> None:
        """Forget the name; running requests finish first. Unknown names are no error."""
        ...

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Generate.

        Raises:
            NotFound: the adapter is not loaded; never answered by the base model instead.
            UserError: prompt or parameters cannot be honoured.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; its `sample` raises. Unknown ids are no error."""
        ...

    async def health(self) -> SamplerHealth:
        """Progress."""
        ...

    async def info(self) -> SamplerInfo:
        """What it can do."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """What a sampling engine is built from."""

    definition: Definition


class SamplerFactory(Protocol):
    """What the entry-point group `lilo.samplers` yields; building loads the base model."""

    def __call__(self, config: SamplerConfig) -> SamplingEngine:
        """Start the engine; called with an event loop running."""
        ...
