"""Sampling sessions: which weights a sampling client's requests are answered with.

A session points at the base model or at one published snapshot and stays there; a *moving* one follows the later
inflight snapshots of its run. When the snapshot is gone, so is the session: the next submission says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.checkpoints import Checkpoints, Entry
from lilo_engine.control.records import Records, SamplingSessionRow
from lilo_engine.errors import Gone, InvalidRequest, NotFound
from lilo_engine.operations.reference import CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSession:
    """One sampling client's target."""

    sampling_session_id: str
    session_id: str
    base_model: str
    ref: CheckpointRef | None
    """None = the base model."""
    attempt: str | None
    """Which publication under `ref`; a later one under the same name is other content."""
    moving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to load before sampling."""

    name: str
    """Names the content: another publication under the same path has another name."""
    folder: str


class SamplingSessions:
    """The sampling sessions of one server; those of an earlier server go on as long as their snapshots do."""

    def __init__(self, records: Records, checkpoints: Checkpoints) -> None:
        """Take over what the records know."""
        self._records = records
        self._checkpoints = checkpoints
        self._sessions = {s.sampling_session_id: s for s in records.now(_load)}
        self._entries: dict[CheckpointRef, Entry] = {}

    async def open(self, session: SamplingSession, now_s: float) -> None:
        """Open a session; the same one again does nothing.

        Raises:
            InvalidRequest: the id is taken by a session with another target.
        """
        known = self._sessions.get(session.sampling_session_id)
        if known is not None and (known == session or (known.moving and session.moving)):
            return
        if known is not None:
            raise InvalidRequest(
                f"sampling session {session.sampling_session_id!r} is open on "
                f"{known.ref or known.base_model}; use another sampling_session_seq_id"
            )
        row = SamplingSessionRow(
            sampling_session_id=session.sampling_session_id,
            session_id=session.session_id,
            base_model=session.base_model,
            checkpoint=None if session.ref is None else str(session.ref),
            attempt=session.attempt,
            moving=session.moving,
            created_s=now_s,
        )
        await self._records.run(lambda sql: sql.merge(row))
        self._sessions[session.sampling_session_id] = session

    async def move(self, run_id: str, ref: CheckpointRef, attempt: str) -> None:
        """Point every moving session of a run at its newest inflight snapshot."""
        moved = [
            SamplingSession(
                sampling_session_id=old.sampling_session_id,
                session_id=old.session_id,
                base_model=old.base_model,
                ref=ref,
                attempt=attempt,
                moving=True,
            )
            for old in self._sessions.values()
            if old.moving and old.ref is not None and old.ref.run_id == run_id
        ]
        changes = [
            {
                "sampling_session_id": new.sampling_session_id,
                "checkpoint": str(ref),
                "attempt": attempt,
            }
            for new in moved
        ]
        if changes:
            await self._records.run(lambda sql: _update(sql, changes))
        self._sessions.update({new.sampling_session_id: new for new in moved})

    def get(self, sampling_session_id: str) -> SamplingSession:
        """A session.

        Raises:
            NotFound: there never was such a session.
        """
        session = self._sessions.get(sampling_session_id)
        if session is None:
            raise NotFound(
                f"there is no sampling session {sampling_session_id!r}; create a sampling client first"
            )
        return session

    async def target(self, sampling_session_id: str) -> Target | None:
        """The snapshot a session samples from; None = the base model.

        Raises:
            NotFound: there never was such a session.
            Gone: its snapshot was removed; the message says the way back.
        """
        session = self.get(sampling_session_id)
        if session.ref is None:
            return None
        entry = await self._entry(session.ref)
        if entry is None or entry.attempt != session.attempt:
            happened = "was removed" if entry is None else "was replaced by a later save"
            raise Gone(
                f"the snapshot {session.ref} of this sampling client {happened}; make a sampling client "
                "on the newer one, or save the weights again (save_weights_and_get_sampling_client)"
            )
        return target_of(entry)

    async def _entry(self, ref: CheckpointRef) -> Entry | None:
        """What is published under a path; remembered, because every sample asks."""
        if ref not in self._entries:
            try:
                self._entries[ref] = await self._checkpoints.get(ref)
            except NotFound:
                return None
        return self._entries[ref]

    def forget(self, ref: CheckpointRef) -> None:
        """A checkpoint was removed or replaced: look it up anew when it is asked for."""
        self._entries.pop(ref, None)

    def followed(self) -> set[CheckpointRef]:
        """Snapshots that a moving session points at."""
        return {s.ref for s in self._sessions.values() if s.moving and s.ref is not None}

    def of_session(self, session_id: str) -> list[str]:
        """Ids of a session's sampling sessions, oldest first."""
        return [
            s.sampling_session_id for s in self._sessions.values() if s.session_id == session_id
        ]


def target_of(entry: Entry) -> Target:
    """The adapter that a published snapshot is, under a name that no other content has."""
    return Target(name=f"{entry.ref}@{entry.attempt}", folder=entry.folder)


def _load(session: Session) -> list[SamplingSession]:
    rows = session.scalars(sa.select(SamplingSessionRow).order_by(SamplingSessionRow.created_s))
    return [
        SamplingSession(
            sampling_session_id=row.sampling_session_id,
            session_id=row.session_id,
            base_model=row.base_model,
            ref=None if row.checkpoint is None else CheckpointRef.parse(row.checkpoint),
            attempt=row.attempt,
            moving=row.moving,
        )
        for row in rows
    ]


def _update(session: Session, changes: list[dict[str, str]]) -> None:
    session.execute(sa.update(SamplingSessionRow), changes)
