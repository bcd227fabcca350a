"""JSON bodies of requests, field for field with the SDK's names; fields the server does not use are ignored.

`decode.py` turns them into operations. Ranges that a type can state are stated here; what depends on the
definition is checked where the definition is known. Passes and steps are in `wire_training.py`, samples and futures in
`wire_sampling.py`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

MAX_METADATA_BYTES = 64 * 1024
"""Of a client's own notes: they are kept in records and manifests, and come with every list."""


def _short(metadata: dict[str, Any]) -> dict[str, Any]:
    size = len(json.dumps(metadata))
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"{size} bytes of notes; up to {MAX_METADATA_BYTES} are kept")
    return metadata


UserMetadata = Annotated[dict[str, Any], AfterValidator(_short)]
Line = Annotated[str, Field(max_length=1024)]
"""A word or a line of a client's own, which is kept like its notes."""
SeqId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""As wide as the binary form's; the engine says what it thinks of numbers below 1."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number that a client counts up itself."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Wire(BaseModel):
    """Unknown fields are ignored: newer clients send more than this server reads.

    Nothing is converted: a number that comes as text or as true is a client's mistake.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, protected_namespaces=())


class CreateSessionBody(Wire):
    """POST /create_session."""

    tags: Annotated[list[Line], Field(max_length=256)] = []
    user_metadata: UserMetadata | None = None
    sdk_version: Line = ""
    display_name: Line | None = None
    project_id: Line | None = None


class SessionBody(Wire):
    """POST /session_heartbeat."""

    session_id: str


class FinishReason(Wire):
    """Why a client ended its session."""

    type: str = "success"


class FinishSessionBody(Wire):
    """POST /sessions/{id}/finish."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class LoraConfigBody(Wire):
    """The adapter a client asks for. The wire's `rank` is the LoRA rank."""

    rank: int = 32
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigBody(Wire):
    """The optimizer of a model for its whole life."""

    type: str = "adamw"


class CreateModelBody(Wire):
    """POST /create_model."""

    session_id: str
    model_seq_id: Count
    base_model: str
    lora_config: LoraConfigBody = LoraConfigBody()
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()
    user_metadata: UserMetadata | None = None


class ModelBody(Wire):
    """POST /get_info and /unload_model."""

    model_id: str


Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
"""Seconds; an hour to ten years."""


class SaveWeightsBody(Wire):
    """POST /save_weights."""

    model_id: str
    seq_id: SeqId
    path: str | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: UserMetadata | None = None


class SaveForSamplerBody(Wire):
    """POST /save_weights_for_sampler; without a path it opens a sampling session."""

    model_id: str
    seq_id: SeqId
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: UserMetadata | None = None


class SaveExternalBody(Wire):
    """POST /save_weights_external."""

    model_id: str
    seq_id: SeqId
    path: str
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[str] | None = None


class CopyWeightsBody(Wire):
    """POST /copy_weights: to a slot of a session, or to a run that is made for it."""

    source_path: str
    session_id: str | None = None
    model_seq_id: Count | None = None
    destination_project_id: str | None = None
    ttl_seconds: Ttl | None = None


class LoadWeightsBody(Wire):
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


class ProjectBody(Wire):
    """PUT /sessions/{id}/project."""

    project_id: str = Field(min_length=1, max_length=1024)


class SearchCursorBody(Wire):
    """Where the next page of a search starts."""

    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: str


class SearchOwnerBody(Wire):
    """Whose sessions; all keys of a server see the same ones, so that this narrows nothing down."""

    type: Literal["own", "accessible", "user"] = "own"


class StatusQueryBody(Wire):
    """How the sessions stand; `reasons` only with `client_finished`."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class SearchSessionsBody(Wire):
    """POST /sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = Field(default=None, min_length=1)
    owner: SearchOwnerBody = SearchOwnerBody()
    statuses: list[StatusQueryBody] | None = Field(default=None, min_length=1)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursorBody | None = None


class WeightsInfoBody(Wire):
    """POST /weights_info."""

    tinker_path: str


class TtlBody(Wire):
    """PUT .../ttl; null = never expires."""

    ttl_seconds: Ttl | None = None
