"""JSON answers, field for field: what the description of the API promises. Not used to make them.

Answers are put together where they are known (`json_response`), since checking each one costs more than making it; that
they are as described is what tests of the API against its description check.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict


class Answer(BaseModel):
    """What all have: nothing that is not described."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Refusal(Answer):
    """Every answer that is no success: what was wrong, what was expected, what to do."""

    detail: str
    kind: str
    """Stable: programs may act on it."""


class Accepted(Answer):
    """A future: ask `retrieve_future` for its result."""

    request_id: str
    model_id: str


class SampleAccepted(Answer):
    """The future of a sample, and an id for each sequence of it."""

    request_id: str
    sample_sequence_ids: list[str]


class TryAgain(Answer):
    """Not ready."""

    type: Literal["try_again"]
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]
    queue_state_reason: str | None = None


class Failed(Answer):
    """A future that failed for good."""

    error: str
    category: Literal["user", "server"]
    kind: str


class Announced(Answer):
    """A result that is large: ask again without `allow_metadata_only`."""

    status: Literal["complete_metadata"]
    response_payload_size: int


class Completion(Answer):
    """A sample that ended."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class Completions(Answer):
    """Samples of one client that ended since its cursor."""

    completions: list[Completion]
    cursor: int


class Joined(Answer):
    """A block of numbers for a copy of a sampling client."""

    type: Literal["join_sampling_session"]
    client_counter: int


class Done(Answer):
    """It was done."""

    status: str


class Health(Answer):
    """Whether a model could be created and sampled from now, with the last progress."""

    status: Literal["ok", "starting"]
    detail: str
    trainer: dict[str, Any] | None = None
    sampler: dict[str, Any] | None = None


class ClientConfig(Answer):
    """Flags for clients."""

    pjwt_auth_enabled: bool
    credential_default_source: str
    sample_use_retrieve_futures: bool
    sample_join_sampling_session: bool


class DynamicConfig(Answer):
    """Flags that may change."""

    sample_cancel_enabled: bool


class SupportedModel(Answer):
    """A base model."""

    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class Capabilities(Answer):
    """What is served."""

    supported_models: list[SupportedModel]


class SessionCreated(Answer):
    """A new session."""

    type: Literal["create_session"]
    session_id: str


class Beat(Answer):
    """The session lives."""

    type: Literal["session_heartbeat"]


class SessionIds(Answer):
    """Sessions, newest first."""

    sessions: list[str]


class SessionAnswer(Answer):
    """One session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None


class SamplingSessionCreated(Answer):
    """A new sampling session."""

    type: Literal["create_sampling_session"]
    sampling_session_id: str


class Sampler(Answer):
    """What a sampling session samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None


class ModelData(Answer):
    """Of the base model."""

    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfo(Answer):
    """One model."""

    type: Literal["get_info"]
    model_id: str
    model_name: str
    is_lora: bool
    lora_rank: int
    model_data: ModelData


class Unloaded(Answer):
    """A model that was ended."""

    type: Literal["unload_model"]
    model_id: str


class CheckpointAnswer(Answer):
    """One published checkpoint."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: AwareDatetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None
    expires_at: AwareDatetime | None


class Cursor(Answer):
    """Which page this is, and of how many entries."""

    offset: int
    limit: int
    total_count: int


class CheckpointList(Answer):
    """Checkpoints, newest first."""

    checkpoints: list[CheckpointAnswer]
    cursor: Cursor | None = None


class RunAnswer(Answer):
    """One training run."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int
    corrupted: bool
    last_request_time: AwareDatetime
    last_checkpoint: CheckpointAnswer | None
    last_sampler_checkpoint: CheckpointAnswer | None
    user_metadata: dict[str, str] | None


class RunList(Answer):
    """Training runs, the one asked for most recently first."""

    training_runs: list[RunAnswer]
    cursor: Cursor


class WeightsInfo(Answer):
    """What is needed to make a model for a checkpoint."""

    base_model: str
    is_lora: bool
    lora_rank: int
    optimizer_config: dict[str, str]
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class Lifetime(Answer):
    """When a checkpoint ends."""

    expires_at: AwareDatetime | None


class WeightsUrls(Answer):
    """A link for each file of a PEFT folder."""

    urls: dict[str, str]
    expires: AwareDatetime


class Copied(Answer):
    """Where the copy is."""

    tinker_path: str


class TraceUrl(Answer):
    """A link to a session's timeline."""

    status: Literal["ready"]
    url: str
