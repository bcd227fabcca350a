"""Session search: sessions by what their clients said of them, newest first, a page at a time; and their projects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.records import Records
from lilo_engine.control.tables import CheckpointRow, RunRow, SessionRow

Status: TypeAlias = Literal["active", "success", "errored", "interrupted", "unknown"]
"""`unknown`: it ended by itself, or with its server."""

_FINISHED = re.compile(r"its client finished it \((success|errored|interrupted)(?:: (.*))?\)", re.S)
_ROWS_AT_ONCE = 500


def finish_reason(kind: str, detail: str | None) -> str:
    """Why a session ended that its client finished; `status_of` reads it back."""
    return f"its client finished it ({kind}{f': {detail}' if detail else ''})"


def status_of(row: SessionRow) -> tuple[Status, str | None]:
    """How a session stands, with the words of its client."""
    if row.ended_s is None:
        return "active", None
    found = _FINISHED.fullmatch(row.end_reason or "")
    if found is None:
        return "unknown", row.end_reason
    kind = found.group(1)
    assert kind in ("success", "errored", "interrupted")
    return kind, found.group(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a search asks for; empty fields ask for nothing."""

    owners: Sequence[str]
    """Whose sessions."""

    session_id: str | None = None
    display_name: str | None = None
    """Words that all must be in the name; a session that has the id or the name is found."""
    project_ids: Sequence[str] | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    statuses: frozenset[Status] | None = None
    after: tuple[float, str] | None = None
    """Time of creation and id of the last one of the page before."""
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One session that was found."""

    row: SessionRow
    num_checkpoints: int
    size_bytes: int


class SessionSearch:
    """Searches the sessions in the records."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def find(self, wanted: Wanted) -> tuple[list[Summary], bool]:
        """A page, newest first, and whether there is more."""
        return await self._records.run(lambda session: _find(session, wanted))

    async def assign_project(self, session_id: str, project_id: str) -> None:
        """Put a session into a project, which is a word of its client. Nothing happens if there is no such session."""

        def work(session: Session) -> None:
            row = session.get(SessionRow, session_id)
            if row is not None:
                row.project_id = project_id

        await self._records.run(work)


def _find(session: Session, wanted: Wanted) -> tuple[list[Summary], bool]:
    query = (
        sa.select(SessionRow)
        .where(SessionRow.owner.in_(wanted.owners))
        .order_by(SessionRow.created_s.desc(), SessionRow.session_id.desc())
    )
    if wanted.after is not None:
        created_s, last_id = wanted.after
        last = session.get(SessionRow, last_id)
        # The time went through a text of microseconds; the record has all of it.
        created_s = created_s if last is None else last.created_s
        same = sa.and_(SessionRow.created_s == created_s, SessionRow.session_id < last_id)
        query = query.where(sa.or_(SessionRow.created_s < created_s, same))
    if wanted.project_ids is not None:
        query = query.where(SessionRow.project_id.in_(wanted.project_ids))
    rows = session.scalars(query.execution_options(yield_per=_ROWS_AT_ONCE))
    found = _first(rows, wanted)
    page = found[: wanted.limit]
    return [_summary(session, row) for row in page], len(found) > wanted.limit


def _first(rows: Iterable[SessionRow], wanted: Wanted) -> list[SessionRow]:
    """One more than a page, of the rows that fit; texts are compared here, alike in every database."""
    found: list[SessionRow] = []
    for row in rows:
        if _fits(row, wanted):
            found.append(row)
        if len(found) > wanted.limit:
            break
    return found


def _fits(row: SessionRow, wanted: Wanted) -> bool:
    if wanted.statuses is not None and status_of(row)[0] not in wanted.statuses:
        return False
    if any(row.user_metadata.get(key) != value for key, value in wanted.user_metadata.items()):
        return False
    if wanted.session_id is None and wanted.display_name is None:
        return True
    if wanted.session_id is not None and row.session_id == wanted.session_id:
        return True
    if wanted.display_name is None:
        return False
    name = (row.display_name or "").casefold()
    return all(word in name for word in wanted.display_name.casefold().split())


def _summary(session: Session, row: SessionRow) -> Summary:
    query = (
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(CheckpointRow.size_bytes), 0))
        .join(RunRow, RunRow.run_id == CheckpointRow.run_id)
        .where(RunRow.session_id == row.session_id, ~CheckpointRow.unnamed)
    )
    count, size_bytes = session.execute(query).one()
    return Summary(row=row, num_checkpoints=count, size_bytes=size_bytes)
