"""JSON bodies of samples, and of the futures of everything; see `wire_json.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lilo_engine.requests.wire_json import Count, Seed, Wire
from lilo_engine.requests.wire_training import ModelInputBody, TargetsBody


class CreateSamplingSessionBody(Wire):
    """POST /create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Count
    model_path: str | None = None
    base_model: str | None = None


class SamplingParamsBody(Wire):
    """How tokens are drawn. `stop`: absent = the model's end token, [] = nothing stops."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    seed: Seed | None = None
    stop: list[int] | list[str] | str | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(Wire):
    """POST /asample."""

    sampling_session_id: str | None = None
    seq_id: Count | None = None
    num_samples: int = Field(default=1, ge=1)
    prompt: ModelInputBody
    sampling_params: SamplingParamsBody
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: TargetsBody | None = None
    prompt_alt_tokens_k: int = Field(default=0, lt=2**31)
    prompt_logprobs_last_n: int | None = None


class SamplingTargetBody(Wire):
    """Whose samples are asked for: one sampling session, and which copy of its client."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Count = 0


class RetrieveFuturesBody(Wire):
    """POST /retrieve_futures."""

    target: SamplingTargetBody
    prev_cursor: Count = 0
    timeout: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: list[str] = Field(default_factory=list[str])


class JoinSamplingSessionBody(Wire):
    """POST /join_sampling_session."""

    sampling_session_id: str


class RetrieveFutureBody(Wire):
    """POST /retrieve_future."""

    request_id: str
    allow_metadata_only: bool = False


class FutureBody(Wire):
    """POST /cancel_future."""

    request_id: str
