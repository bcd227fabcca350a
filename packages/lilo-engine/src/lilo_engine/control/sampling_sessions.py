"""Sampling sessions: which weights a sampling client's requests are answered with.

A session points at the base model or at one published snapshot and stays there; a *moving* one follows the later
inflight snapshots of its run. When the snapshot is gone, so is the session: the next submission says so.

Those that can be sampled from are in memory. One whose snapshot was removed, or whose client's session ended, is in the
records alone: it can still be looked at, until the records of its session are too old.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.checkpoints import Checkpoints, Entry
from lilo_engine.control.records import Records, SamplingSessionRow, SessionRow
from lilo_engine.errors import Gone, InvalidRequest, NotFound
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.sampling.residents import AdapterVersion


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


class SamplingSessions:
    """The sampling sessions of one server; those of an earlier server go on with the session they belong to."""

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

    async def get(self, sampling_session_id: str) -> SamplingSession:
        """A session, also one that can no longer be sampled from.

        Raises:
            NotFound: there never was such a session.
        """
        session = self._sessions.get(sampling_session_id)
        if session is None:
            session = await self._records.run(lambda sql: _find(sql, sampling_session_id))
        if session is None:
            raise NotFound(no_sampler(sampling_session_id))
        return session

    async def entry(self, session: SamplingSession) -> Entry | None:
        """The snapshot a session samples from; None = the base model.

        Raises:
            Gone: its snapshot was removed; the message says the way back.
        """
        if session.ref is None:
            return None
        entry = await self._entry(session.ref)
        if entry is None or entry.attempt != session.attempt:
            happened = "was removed" if entry is None else "was replaced by a later save"
            raise Gone(
                f"the snapshot {session.ref} of this sampling client {happened}; make a sampling client "
                "on the newer one, or save the weights again (save_weights_and_get_sampling_client)"
            )
        return entry

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

    def removed(self, ref: CheckpointRef) -> None:
        """A checkpoint was removed: nothing samples from it any more."""
        self.forget(ref)
        for session in [s for s in self._sessions.values() if s.ref == ref]:
            del self._sessions[session.sampling_session_id]

    def end_of(self, session_id: str) -> list[str]:
        """A client's session ended: let go of its sampling sessions, and return their ids."""
        ended = [s for s in self._sessions.values() if s.session_id == session_id]
        for session in ended:
            del self._sessions[session.sampling_session_id]
        used = {s.ref for s in self._sessions.values()}
        for session in ended:
            if session.ref is not None and session.ref not in used:
                self.forget(session.ref)
        return [session.sampling_session_id for session in ended]

    def owners(self) -> set[str]:
        """Sessions that have sampling sessions in memory."""
        return {session.session_id for session in self._sessions.values()}

    def followed(self) -> set[CheckpointRef]:
        """Snapshots that a moving session points at."""
        return {s.ref for s in self._sessions.values() if s.moving and s.ref is not None}

    async def of_session(self, session_id: str) -> list[str]:
        """Ids of a session's sampling sessions, oldest first."""
        query = sa.select(SamplingSessionRow.sampling_session_id).where(
            SamplingSessionRow.session_id == session_id
        )
        return await self._records.run(
            lambda sql: list(sql.scalars(query.order_by(SamplingSessionRow.created_s)))
        )


def no_sampler(sampling_session_id: str) -> str:
    """What to answer for a sampling session that is not there, or not the caller's."""
    return f"there is no sampling session {sampling_session_id!r}; create a sampling client first"


def target_of(entry: Entry) -> AdapterVersion:
    """The adapter that a published snapshot is, under a name that no other content has."""
    return AdapterVersion(name=f"{entry.ref}@{entry.attempt}", folder=entry.folder)


def _load(session: Session) -> list[SamplingSession]:
    """Those whose client's session has not ended."""
    ended = sa.select(SessionRow.session_id).where(SessionRow.ended_s.is_not(None))
    query = sa.select(SamplingSessionRow).where(SamplingSessionRow.session_id.not_in(ended))
    return [_of_row(row) for row in session.scalars(query)]


def _find(session: Session, sampling_session_id: str) -> SamplingSession | None:
    row = session.get(SamplingSessionRow, sampling_session_id)
    return None if row is None else _of_row(row)


def _of_row(row: SamplingSessionRow) -> SamplingSession:
    return SamplingSession(
        sampling_session_id=row.sampling_session_id,
        session_id=row.session_id,
        base_model=row.base_model,
        ref=None if row.checkpoint is None else CheckpointRef.parse(row.checkpoint),
        attempt=row.attempt,
        moving=row.moving,
    )


def _update(session: Session, changes: list[dict[str, str]]) -> None:
    session.execute(sa.update(SamplingSessionRow), changes)
