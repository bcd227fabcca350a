"""JSON bodies of passes and steps, with the data in them; see `wire_json.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from lilo_engine.requests.wire_json import SeqId, Wire


class TensorBody(Wire):
    """A tensor as JSON numbers, row-major; sparse CSR when both index lists are there."""

    data: list[float] | list[int]
    dtype: Literal["int64", "float32"] = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class TargetsBody(Wire):
    """Token ids at prompt positions, [len(prompt) - 1, K]; only listed cells count when it is sparse CSR."""

    data: list[int]
    dtype: Literal["int64"] = "int64"
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class ChunkBody(Wire):
    """One piece of a model input; only text can be honoured, other types are named in the refusal."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list[int])


class ModelInputBody(Wire):
    """The pieces in order."""

    chunks: list[ChunkBody]


class DatumBody(Wire):
    """One example."""

    model_input: ModelInputBody
    loss_fn_inputs: dict[str, TensorBody]


class ForwardBackwardInputBody(Wire):
    """What older clients nest below `forward_backward_input` or `forward_input`."""

    data: list[DatumBody]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardBody(Wire):
    """POST /forward_backward and /forward of clients that speak JSON."""

    model_id: str
    seq_id: SeqId
    forward_backward_input: ForwardBackwardInputBody = Field(
        validation_alias=AliasChoices("forward_backward_input", "forward_input")
    )


class OptimParamsBody(Wire):
    """AdamW's numbers; `type` is sent only by other optimizers."""

    type: str = "adamw"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(Wire):
    """POST /optim_step."""

    model_id: str
    seq_id: SeqId
    adam_params: OptimParamsBody = Field(
        validation_alias=AliasChoices("adam_params", "optimizer_params", "optim_params")
    )
