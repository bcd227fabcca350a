"""Runs: every model that was made resident, for listing and for telling a client what became of its model.

The engine knows which models are resident now; this is their history, which any process over the same records may ask.
The latest request of a run is kept in memory and reaches SQL seconds later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.records import Records
from lilo_engine.control.tables import RunRow
from lilo_engine.errors import Gone, NotFound
from lilo_engine.operations.operation import CreateModel

_NOTED = 65536
"""Runs whose last request is noted between two flushes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some of the rows, and how many there are."""

    rows: Sequence[RunRow]
    total: int


class Runs:
    """The training runs of the records."""

    def __init__(self, records: Records) -> None:
        """Know none yet."""
        self._records = records
        self._requested_s: dict[str, float] = {}
        """When runs were last asked for here, since the last `flush`."""

    def take_over(self) -> None:
        """Begin as the engine's process: no model is resident, those of an earlier engine ended with it."""
        self._records.now(_end_all)

    async def created(self, request: CreateModel, now_s: float) -> None:
        """A model became resident.

        Raises:
            Gone: a model of this id has ended; the numbers of its checkpoints must not begin anew.
        """
        row = _row(request, now_s)

        def work(session: Session) -> None:
            there = session.get(RunRow, row.run_id)
            if there is not None and there.ended_s is not None:
                raise _gone(there)
            session.merge(row)

        await self._records.run(work)

    async def ended(self, run_id: str, reason: str, now_s: float) -> None:
        """A model is not resident any more."""

        def work(session: Session) -> None:
            row = session.get(RunRow, run_id)
            if row is not None and row.ended_s is None:
                row.ended_s, row.end_reason = now_s, reason

        await self._records.run(work)

    def touch(self, run_id: str, now_s: float) -> None:
        """Note that a request for this run came; unknown runs are no error."""
        if run_id in self._requested_s or len(self._requested_s) < _NOTED:
            self._requested_s[run_id] = now_s

    async def flush(self) -> None:
        """Write down the latest request of each live run that was asked for."""
        seen, self._requested_s = self._requested_s, {}
        if seen:
            await self._records.run(lambda session: _update(session, seen))

    async def get(self, run_id: str) -> RunRow:
        """A run, live or ended.

        Raises:
            NotFound: there never was such a run.
        """
        row = await self.find(run_id)
        if row is None:
            raise NotFound(no_run(run_id))
        return row

    async def find(self, run_id: str) -> RunRow | None:
        """A run, live or ended; None if there never was such a run."""
        return await self._records.run(lambda session: session.get(RunRow, run_id))

    async def why_gone(self, run_id: str) -> Gone | None:
        """What to answer for a run that the engine does not know; None if it never was."""
        row = await self.find(run_id)
        return None if row is None else _gone(row)

    async def refuse_ended(self, run_id: str) -> None:
        """Refuse the id of a model that has ended for a new one.

        Raises:
            Gone: it has.
        """
        row = await self.find(run_id)
        if row is not None and row.ended_s is not None:
            raise _gone(row)

    async def is_live(self, run_id: str) -> bool:
        """Whether the model is resident."""
        row = await self.find(run_id)
        return row is not None and row.ended_s is None

    async def live_of(self, session_id: str) -> list[str]:
        """Resident models of a session, oldest first."""
        live = (RunRow.session_id == session_id) & RunRow.ended_s.is_(None)
        query = sa.select(RunRow.run_id).where(live).order_by(RunRow.created_s)
        return await self._records.run(lambda session: list(session.scalars(query)))

    async def of_session(self, session_id: str) -> list[str]:
        """All runs of a session, oldest first."""
        query = sa.select(RunRow.run_id).where(RunRow.session_id == session_id)
        return await self._records.run(
            lambda session: list(session.scalars(query.order_by(RunRow.created_s)))
        )

    async def listed(self, owners: Sequence[str], limit: int, offset: int) -> Page:
        """Runs of these owners, the one asked for most recently first."""
        await self.flush()

        def work(session: Session) -> Page:
            theirs = RunRow.owner.in_(owners)
            # The id decides between equal times: PostgreSQL has no order of its own from page to page.
            newest = (RunRow.last_request_s.desc(), RunRow.run_id)
            query = sa.select(RunRow).where(theirs).order_by(*newest)
            total = session.scalar(sa.select(sa.func.count(RunRow.run_id)).where(theirs)) or 0
            return Page(rows=session.scalars(query.limit(limit).offset(offset)).all(), total=total)

        return await self._records.run(work)


def no_run(run_id: str) -> str:
    """What to answer for a run that is not there, or not the caller's."""
    return f"there is no model {run_id!r}; create one first"


def _gone(row: RunRow) -> Gone:
    return Gone(
        f"model {row.run_id!r} ended: {row.end_reason or 'it is not resident'}; create a new one, "
        "from its last checkpoint if it has one (create_training_client_from_state_with_optimizer)"
    )


def _row(request: CreateModel, now_s: float) -> RunRow:
    lora = request.lora
    return RunRow(
        run_id=request.model_id,
        session_id=request.session_id,
        base_model=request.base_model,
        lora_rank=lora.lora_rank,
        alpha=lora.alpha,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        source=None if request.source is None else str(request.source),
        owner=request.owner,
        user_metadata=dict(request.user_metadata),
        created_s=now_s,
        last_request_s=now_s,
        ended_s=None,
        end_reason=None,
    )


def _end_all(session: Session) -> None:
    session.execute(
        sa.update(RunRow)
        .where(RunRow.ended_s.is_(None))
        .values(ended_s=RunRow.last_request_s, end_reason="the server was stopped")
    )


def _update(session: Session, seen: Mapping[str, float]) -> None:
    for run_id, seen_s in seen.items():
        live = (RunRow.run_id == run_id) & RunRow.ended_s.is_(None)
        later = live & (RunRow.last_request_s < seen_s)
        session.execute(sa.update(RunRow).where(later).values(last_request_s=seen_s))
