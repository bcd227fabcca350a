"""JSON answers of searches; as `wire_answers.py`, for the description of the API alone."""

from __future__ import annotations

from typing import Any

from pydantic import AwareDatetime

from lilo_engine.requests.wire_answers import Answer


class FoundSession(Answer):
    """One session of a search."""

    session_id: str
    created_at: AwareDatetime
    owner: str
    project_id: str
    status: dict[str, Any] | None
    checkpoints_count: int
    checkpoint_storage_bytes: int
    display_name: str | None
    user_metadata: dict[str, str]


class NextPage(Answer):
    """Where the next page of a search starts."""

    last_created_at: AwareDatetime
    last_session_id: str


class FoundSessions(Answer):
    """A page of a search, newest first."""

    sessions: list[FoundSession]
    next_cursor: NextPage | None
