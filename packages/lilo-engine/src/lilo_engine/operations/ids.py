"""Ids and names that follow a rule. The only file that puts them together and takes them apart; `tinker://` is `reference.py`'s.

    {session}:train:{n}     a model, and its training run      {session}:sample:{n}    a sampling session

The SDK builds both by itself, so that they cannot be changed.
"""

from __future__ import annotations

from lilo_engine.operations.operation import ModelId

EPHEMERAL_PREFIX = "ephemeral-"
"""Names of snapshots that a client did not name; they are not listed."""
INFLIGHT_PREFIX = "inflight-"
"""Names of snapshots that a model's moving sampling clients follow; not listed either."""
SUSPENDED_NAME = "lilo-suspended"
"""Name of the training checkpoint that the engine makes of a model when it takes its slot; listed like any other."""

_TRAIN = ":train:"
_SAMPLE = ":sample:"
_DIRECT = "direct:"


def model_id_of(session_id: str, model_seq_id: int) -> ModelId:
    """The id of a session's model."""
    return ModelId(f"{session_id}{_TRAIN}{model_seq_id}")


def session_of(model_id: str) -> str:
    """The session part of a model id; the whole id when it has none."""
    return model_id.rsplit(_TRAIN, 1)[0]


def sampling_session_id_of(session_id: str, sampling_session_seq_id: int) -> str:
    """The id of a session's sampling session."""
    return f"{session_id}{_SAMPLE}{sampling_session_seq_id}"


def direct_sampler_id(owner: str, token: str) -> str:
    """What stands for the sampling session of a sample that names its weights itself, as older clients do."""
    return f"{_DIRECT}{owner}:{token}"


def owner_of_direct(sampling_session_id: str) -> str | None:
    """The owner in a `direct_sampler_id`; None if it is none."""
    if not sampling_session_id.startswith(_DIRECT):
        return None
    return sampling_session_id.removeprefix(_DIRECT).partition(":")[0]


def session_of_sampler(sampling_session_id: str) -> str:
    """The session part of a sampling session's id; the whole id when it has none."""
    return sampling_session_id.rsplit(_SAMPLE, 1)[0]
