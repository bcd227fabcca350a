"""Sampling sessions: which weights a sampling client's requests are answered with.

A session points at the base model or at one published snapshot and stays there; a *moving* one follows the later
inflight snapshots of its run. When the snapshot is gone, so is the session: the next submission says so.

The records have all of them; of those that never change, and of snapshots for a second, a copy is at hand, because every
sample asks. One whose snapshot was removed, or whose client's session ended, can still be looked at until the records of
its session are too old.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.checkpoints import Checkpoints, Entry
from lilo_engine.control.records import Records
from lilo_engine.control.tables import SamplingSessionRow, SessionRow
from lilo_engine.errors import Gone, InvalidRequest, NotFound
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.sampling.residents import AdapterVersion

_KEPT = 8192
"""Sessions, and snapshots, that are at hand."""
_LOOK_AGAIN_S = 1.0
"""How long a snapshot that another process removed may still be sampled from."""


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
    """The sampling sessions of the records; they go on with the client's session that they belong to."""

    def __init__(self, records: Records, checkpoints: Checkpoints) -> None:
        """Know none yet."""
        self._records = records
        self._checkpoints = checkpoints
        self._fixed: OrderedDict[str, SamplingSession] = OrderedDict()
        """Sessions that do not move, the latest asked for last."""
        self._entries: OrderedDict[CheckpointRef, tuple[float, Entry]] = OrderedDict()
        """With the time of the look."""

    async def open(self, session: SamplingSession, now_s: float) -> None:
        """Open a session; the same one again does nothing.

        Raises:
            InvalidRequest: the id is taken by a session with another target.
        """
        row = SamplingSessionRow(
            sampling_session_id=session.sampling_session_id,
            session_id=session.session_id,
            base_model=session.base_model,
            checkpoint=None if session.ref is None else str(session.ref),
            attempt=session.attempt,
            moving=session.moving,
            created_s=now_s,
        )

        def work(sql: Session) -> SamplingSession:
            known = _find(sql, session.sampling_session_id)
            if known is not None:
                return known
            sql.add(row)
            return session

        known = await self._records.run(work)
        if known != session and not (known.moving and session.moving):
            raise InvalidRequest(
                f"sampling session {session.sampling_session_id!r} is open on "
                f"{known.ref or known.base_model}; use another sampling_session_seq_id"
            )

    async def move(self, run_id: str, ref: CheckpointRef, attempt: str) -> None:
        """Point every moving session of a run at its newest inflight snapshot."""
        start = CheckpointRef.start_of(run_id)
        theirs = SamplingSessionRow.checkpoint.startswith(start, autoescape=True)
        moving = sa.update(SamplingSessionRow).where(SamplingSessionRow.moving, theirs)
        moved = moving.values(checkpoint=str(ref), attempt=attempt)
        await self._records.run(lambda sql: sql.execute(moved))

    async def get(self, sampling_session_id: str) -> SamplingSession:
        """A session, also one that can no longer be sampled from.

        Raises:
            NotFound: there never was such a session.
        """
        session = self._fixed.get(sampling_session_id)
        if session is not None:
            self._fixed.move_to_end(sampling_session_id)
            return session
        session = await self._records.run(lambda sql: _find(sql, sampling_session_id))
        if session is None:
            raise NotFound(no_sampler(sampling_session_id))
        if not session.moving:
            self._fixed[sampling_session_id] = session
            if len(self._fixed) > _KEPT:
                self._fixed.popitem(last=False)
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
            # Another process may have published there a moment ago.
            self.forget(session.ref)
            entry = await self._entry(session.ref)
        if entry is None or entry.attempt != session.attempt:
            happened = "was removed" if entry is None else "was replaced by a later save"
            raise Gone(
                f"the snapshot {session.ref} of this sampling client {happened}; make a sampling client "
                "on the newer one, or save the weights again (save_weights_and_get_sampling_client)"
            )
        return entry

    async def _entry(self, ref: CheckpointRef) -> Entry | None:
        """What is published under a path."""
        looked_s, entry = self._entries.get(ref, (float("-inf"), None))
        now_s = time.monotonic()
        if entry is not None and now_s - looked_s < _LOOK_AGAIN_S:
            return entry
        self.forget(ref)
        entry = await self._checkpoints.find(ref)
        if entry is not None:
            self._entries[ref] = (now_s, entry)
            if len(self._entries) > _KEPT:
                self._entries.popitem(last=False)
        return entry

    def forget(self, ref: CheckpointRef) -> None:
        """A checkpoint was removed or replaced: look it up anew when it is asked for."""
        self._entries.pop(ref, None)

    def look_again(self) -> None:
        """Let go of what is at hand: records of sessions are removed some day."""
        self._fixed.clear()

    async def followed(self) -> set[CheckpointRef]:
        """Snapshots that a moving session points at, of clients whose session has not ended."""
        query = sa.select(SamplingSessionRow.checkpoint).where(
            SamplingSessionRow.moving, SamplingSessionRow.session_id.not_in(_ended())
        )
        paths = await self._records.run(lambda sql: list(sql.scalars(query)))
        return {CheckpointRef.parse(path) for path in paths if path is not None}

    async def of_ended_since(self, since_s: float) -> list[str]:
        """Ids of sampling sessions whose client's session ended since a time."""
        ended = sa.select(SessionRow.session_id).where(SessionRow.ended_s >= since_s)
        query = sa.select(SamplingSessionRow.sampling_session_id)
        late = query.where(SamplingSessionRow.session_id.in_(ended))
        return await self._records.run(lambda sql: list(sql.scalars(late)))

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


def _ended() -> sa.Select[str]:
    return sa.select(SessionRow.session_id).where(SessionRow.ended_s.is_not(None))


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
