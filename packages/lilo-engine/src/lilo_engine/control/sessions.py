"""Sessions: who is connected. A session ends when its client says so, or has not been heard of for too long.

When each live session was last heard of is in memory, because every request touches it; SQL sees it seconds later
(`flush`), and so do other processes over the same records: one that ended elsewhere, or was opened there, is seen by
`flush` and `look_again`, or when somebody asks for it. Ended ones are in the records alone, until they are too old to be
listed.
This file decides nothing about models: whoever ends a session asks for its models and unloads them
(`control/sweeper.py`, `requests/sessions.py`).
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.access import COMMON
from lilo_engine.control.records import Records
from lilo_engine.control.tables import SamplingSessionRow, SessionRow
from lilo_engine.errors import Gone, NotFound

_REMEMBERED = 1024
"""Ended sessions whose reason is at hand; of others the records know it."""
_OWNERS_KEPT = 65536
"""Sessions whose owner is at hand, because every request asks; of others the records know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """What a client says of itself."""

    sdk_version: str = ""
    display_name: str | None = None
    project_id: str | None = None
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    owner: str = COMMON
    """Whose session it is."""


class Sessions:
    """The sessions of the records, as one process knows them."""

    def __init__(self, records: Records) -> None:
        """Know none yet."""
        self._records = records
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._last_seen_s: dict[str, float] = {}
        """Of those that are alive as far as this process knows."""
        self._end_reasons: OrderedDict[str, str] = OrderedDict()

    async def create(self, new: NewSession, now_s: float) -> str:
        """Start a session and return its id."""
        session_id = str(uuid.uuid4())
        row = SessionRow(
            session_id=session_id,
            created_s=now_s,
            last_seen_s=now_s,
            ended_s=None,
            end_reason=None,
            sdk_version=new.sdk_version,
            display_name=new.display_name,
            tags=list(new.tags),
            user_metadata=dict(new.user_metadata),
            project_id=new.project_id,
            owner=new.owner,
        )
        await self._records.run(lambda session: session.add(row))
        self._last_seen_s[session_id] = now_s
        self._remember_owner(session_id, new.owner)
        return session_id

    def take_over(self, now_s: float) -> None:
        """Begin as the engine's process: what was alive when the one before stopped is alive, and heard of now."""

        def work(session: Session) -> None:
            alive = sa.update(SessionRow).where(SessionRow.ended_s.is_(None))
            session.execute(alive.values(last_seen_s=now_s))

        self._records.now(work)
        self._owners = OrderedDict(
            (session_id, owner) for session_id, owner, _ in self._records.now(_alive)
        )
        self._last_seen_s = dict.fromkeys(self._owners, now_s)

    async def look_again(self) -> None:
        """Learn which sessions are alive, and when others last heard of them."""
        known = set(self._last_seen_s)
        seen = {session_id: seen_s for session_id, _, seen_s in await self._records.run(_alive)}
        for session_id in known - set(seen):
            self._last_seen_s.pop(session_id, None)
        for session_id, seen_s in seen.items():
            here_s = self._last_seen_s.get(session_id, seen_s)
            self._last_seen_s[session_id] = max(here_s, seen_s)

    async def owner(self, session_id: str) -> str | None:
        """Whose session it is, ended or not; None if there never was such a session. It never changes."""
        owner = self._owners.get(session_id)
        if owner is None:
            query = sa.select(SessionRow.owner).where(SessionRow.session_id == session_id)
            owner = await self._records.run(lambda session: session.scalar(query))
            if owner is not None:
                self._remember_owner(session_id, owner)
        return owner

    async def touch(self, session_id: str, now_s: float) -> None:
        """Note that the client was heard of.

        Raises:
            NotFound: there never was such a session.
            Gone: it ended; the message says why and how to go on.
        """
        if session_id in self._last_seen_s:
            self._last_seen_s[session_id] = now_s
            return
        row = await self._records.run(lambda session: session.get(SessionRow, session_id))
        if row is not None and row.ended_s is None:
            # Another process opened it, or this one was started again.
            self._last_seen_s[session_id] = now_s
            return
        reason = await self._end_reason(session_id)
        if reason is not None:
            raise Gone(
                f"session {session_id!r} ended: {reason}; make a new ServiceClient "
                "and restore from the last checkpoint"
            )
        raise NotFound(no_session(session_id))

    def alive(self) -> set[str]:
        """Sessions that have not ended."""
        return set(self._last_seen_s)

    def idle(self, now_s: float, limit_s: float) -> list[str]:
        """Sessions that were not heard of for longer than the limit."""
        return [id for id in self._last_seen_s if self.is_idle(id, now_s, limit_s)]

    def is_idle(self, session_id: str, now_s: float, limit_s: float) -> bool:
        """Whether a session is alive and was not heard of for longer than the limit."""
        return now_s - self._last_seen_s.get(session_id, now_s) > limit_s

    async def end(self, session_id: str, reason: str, now_s: float) -> bool:
        """End a session; the first reason wins. True if it was alive.

        Raises:
            NotFound: there never was such a session.
        """
        self._last_seen_s.pop(session_id, None)

        def work(session: Session) -> bool:
            # One statement, so that of two processes one alone ends it.
            alive = (SessionRow.session_id == session_id) & SessionRow.ended_s.is_(None)
            values = {"ended_s": now_s, "end_reason": reason}
            return _num_changed(session, sa.update(SessionRow).where(alive).values(values)) == 1

        if await self._records.run(work):
            self._end_reasons[session_id] = reason
            while len(self._end_reasons) > _REMEMBERED:
                self._end_reasons.popitem(last=False)
            return True
        if await self._end_reason(session_id) is None:
            raise NotFound(no_session(session_id))
        return False

    async def _end_reason(self, session_id: str) -> str | None:
        """Why a session ended; None if there is no such one among the ended ones."""
        if session_id in self._end_reasons:
            return self._end_reasons[session_id]
        row = await self._records.run(lambda session: session.get(SessionRow, session_id))
        return None if row is None else row.end_reason

    async def prune(self, before_s: float) -> None:
        """Forget the records of sessions that ended before this time, with those of their sampling sessions."""
        await self._records.run(lambda session: _prune(session, before_s))

    async def flush(self) -> None:
        """Write down when each live session was last heard of, and learn which were ended by another process."""
        seen = dict(self._last_seen_s)
        if seen:
            for session_id in await self._records.run(lambda session: _heard(session, seen)):
                self._last_seen_s.pop(session_id, None)

    async def listed(self, owners: Sequence[str], limit: int, offset: int) -> list[str]:
        """Ids of these owners' sessions, newest first."""
        query = (
            sa.select(SessionRow.session_id)
            .where(SessionRow.owner.in_(owners))
            # The id decides between equal times: PostgreSQL has no order of its own from page to page.
            .order_by(SessionRow.created_s.desc(), SessionRow.session_id)
        )
        return await self._records.run(
            lambda session: list(session.scalars(query.limit(limit).offset(offset)))
        )

    async def get(self, session_id: str) -> SessionRow:
        """The record of a session.

        Raises:
            NotFound: there never was such a session.
        """
        row = await self._records.run(lambda session: session.get(SessionRow, session_id))
        if row is None:
            raise NotFound(no_session(session_id))
        return row

    def _remember_owner(self, session_id: str, owner: str) -> None:
        self._owners[session_id] = owner
        while len(self._owners) > _OWNERS_KEPT:
            self._owners.popitem(last=False)


def no_session(session_id: str) -> str:
    """What to answer for a session that is not there, or not the caller's."""
    return f"there is no session {session_id!r}; make a new ServiceClient"


def _alive(session: Session) -> list[tuple[str, str, float]]:
    """Id, owner and last sign of each session that has not ended."""
    query = sa.select(SessionRow.session_id, SessionRow.owner, SessionRow.last_seen_s)
    rows = session.execute(query.where(SessionRow.ended_s.is_(None)))
    return [(session_id, owner, seen_s) for session_id, owner, seen_s in rows]


def _prune(session: Session, before_s: float) -> None:
    old = sa.select(SessionRow.session_id).where(SessionRow.ended_s < before_s)
    samplers = sa.delete(SamplingSessionRow).where(SamplingSessionRow.session_id.in_(old))
    without = {"synchronize_session": False}
    session.execute(samplers, execution_options=without)
    session.execute(
        sa.delete(SessionRow).where(SessionRow.ended_s < before_s), execution_options=without
    )


def _heard(session: Session, seen: Mapping[str, float]) -> list[str]:
    """Note the latest signs of life; returns which of the sessions are over."""
    alive: set[str] = set()
    for session_id, _, known_s in _alive(session):
        alive.add(session_id)
        if seen.get(session_id, known_s) > known_s:
            later = (SessionRow.session_id == session_id) & (
                SessionRow.last_seen_s < seen[session_id]
            )
            session.execute(sa.update(SessionRow).where(later).values(last_seen_s=seen[session_id]))
    return [session_id for session_id in seen if session_id not in alive]


def _num_changed(session: Session, statement: sa.Update) -> int:
    result = cast("sa.CursorResult[Any]", session.execute(statement))
    return result.rowcount
