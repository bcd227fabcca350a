"""JSON bodies of requests, field for field with the SDK's names; fields the server does not use are ignored.

`decode.py` turns them into operations. Ranges that a type can state are stated here; what depends on the
definition is checked where the definition is known.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, AwareDatetime, BaseModel, ConfigDict, Field

UserMetadata = dict[str, Any]
SeqId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""As wide as the binary form's; the engine says what it thinks of numbers below 1."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number that a client counts up itself."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Wire(BaseModel):
    """Unknown fields are ignored: newer clients send more than this server reads.

    Nothing is converted: a number that comes as text or as true is a client's mistake.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, protected_namespaces=())


class CreateSessionBody(_Wire):
    """POST /create_session."""

    tags: list[str] = []
    user_metadata: UserMetadata | None = None
    sdk_version: str = ""
    display_name: str | None = None
    project_id: str | None = None


class SessionBody(_Wire):
    """POST /session_heartbeat."""

    session_id: str


class FinishReason(_Wire):
    """Why a client ended its session."""

    type: str = "success"


class FinishSessionBody(_Wire):
    """POST /sessions/{id}/finish."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class LoraConfigBody(_Wire):
    """The adapter a client asks for. The wire's `rank` is the LoRA rank."""

    rank: int = 32
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigBody(_Wire):
    """The optimizer of a model for its whole life."""

    type: str = "adamw"


class CreateModelBody(_Wire):
    """POST /create_model."""

    session_id: str
    model_seq_id: Count
    base_model: str
    lora_config: LoraConfigBody = LoraConfigBody()
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()
    user_metadata: UserMetadata | None = None


class ModelBody(_Wire):
    """POST /get_info and /unload_model."""

    model_id: str


class TensorBody(_Wire):
    """A tensor as JSON numbers, row-major; sparse CSR when both index lists are there."""

    data: list[float] | list[int]
    dtype: Literal["int64", "float32"] = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class TargetsBody(_Wire):
    """Token ids at prompt positions, [len(prompt) - 1, K]; only listed cells count when it is sparse CSR."""

    data: list[int]
    dtype: Literal["int64"] = "int64"
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class ChunkBody(_Wire):
    """One piece of a model input; only text can be honoured, other types are named in the refusal."""

    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInputBody(_Wire):
    """The pieces in order."""

    chunks: list[ChunkBody]


class DatumBody(_Wire):
    """One example."""

    model_input: ModelInputBody
    loss_fn_inputs: dict[str, TensorBody]


class ForwardBackwardInputBody(_Wire):
    """What older clients nest below `forward_backward_input` or `forward_input`."""

    data: list[DatumBody]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardBody(_Wire):
    """POST /forward_backward and /forward of clients that speak JSON."""

    model_id: str
    seq_id: SeqId
    forward_backward_input: ForwardBackwardInputBody = Field(
        validation_alias=AliasChoices("forward_backward_input", "forward_input")
    )


class OptimParamsBody(_Wire):
    """AdamW's numbers; `type` is sent only by other optimizers."""

    type: str = "adamw"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(_Wire):
    """POST /optim_step."""

    model_id: str
    seq_id: SeqId
    adam_params: OptimParamsBody = Field(
        validation_alias=AliasChoices("adam_params", "optimizer_params", "optim_params")
    )


Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
"""Seconds; an hour to ten years."""


class SaveWeightsBody(_Wire):
    """POST /save_weights."""

    model_id: str
    seq_id: SeqId
    path: str | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: UserMetadata | None = None


class SaveForSamplerBody(_Wire):
    """POST /save_weights_for_sampler; without a path it opens a sampling session."""

    model_id: str
    seq_id: SeqId
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: UserMetadata | None = None


class SaveExternalBody(_Wire):
    """POST /save_weights_external."""

    model_id: str
    seq_id: SeqId
    path: str
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[str] | None = None


class CopyWeightsBody(_Wire):
    """POST /copy_weights: to a slot of a session, or to a run that is made for it."""

    source_path: str
    session_id: str | None = None
    model_seq_id: Count | None = None
    destination_project_id: str | None = None
    ttl_seconds: Ttl | None = None


class LoadWeightsBody(_Wire):
    """POST /load_weights: in place with (model_id, seq_id), or a new model with (session_id, model_seq_id)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: SeqId | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfigBody | None = None
    user_metadata: UserMetadata | None = None


class ProjectBody(_Wire):
    """PUT /sessions/{id}/project."""

    project_id: str = Field(min_length=1)


class SearchCursorBody(_Wire):
    """Where the next page of a search starts."""

    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: str


class SearchOwnerBody(_Wire):
    """Whose sessions; all keys of a server see the same ones, so that this narrows nothing down."""

    type: Literal["own", "accessible", "user"] = "own"


class StatusQueryBody(_Wire):
    """How the sessions stand; `reasons` only with `client_finished`."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class SearchSessionsBody(_Wire):
    """POST /sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = Field(default=None, min_length=1)
    owner: SearchOwnerBody = SearchOwnerBody()
    statuses: list[StatusQueryBody] | None = Field(default=None, min_length=1)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursorBody | None = None


class CreateSamplingSessionBody(_Wire):
    """POST /create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Count
    model_path: str | None = None
    base_model: str | None = None


class SamplingParamsBody(_Wire):
    """How tokens are drawn. `stop`: absent = the model's end token, [] = nothing stops."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    seed: Seed | None = None
    stop: list[int] | list[str] | str | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(_Wire):
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


class SamplingTargetBody(_Wire):
    """Whose samples are asked for: one sampling session, and which copy of its client."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Count = 0


class RetrieveFuturesBody(_Wire):
    """POST /retrieve_futures."""

    target: SamplingTargetBody
    prev_cursor: Count = 0
    timeout: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: list[str] = []


class JoinSamplingSessionBody(_Wire):
    """POST /join_sampling_session."""

    sampling_session_id: str


class RetrieveFutureBody(_Wire):
    """POST /retrieve_future."""

    request_id: str
    allow_metadata_only: bool = False


class FutureBody(_Wire):
    """POST /cancel_future."""

    request_id: str


class WeightsInfoBody(_Wire):
    """POST /weights_info."""

    tinker_path: str


class TtlBody(_Wire):
    """PUT .../ttl; null = never expires."""

    ttl_seconds: Ttl | None = None
