"""Resume: what a run goes on from: for each of its models the newest training state that is whole, to the last byte.

Asked before the server opens its records, because opening them ends the models of the life before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from lilo_volume import Volume, catalogue, latest
from sqlalchemy.orm import Session

from lilo_engine.control.records import Records
from lilo_engine.control.tables import RunRow
from lilo_engine.operations.reference import CheckpointRef

WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where one model goes on."""

    model_id: str
    path: str | None
    """What `create_training_client_from_state_with_optimizer` takes; None: nothing whole was published."""
    optimizer_step: int | None
    """Steps that are in it, where its maker wrote them down."""
    skipped: tuple[str, ...]
    """Newer states that are damaged or were never finished, and why each was passed over."""


def find_resumes(volume: Volume, records: Records) -> tuple[Resume, ...]:
    """Where the models that were alive go on, and those that published after the last snapshot of the records.

    Reads every byte of each state that it names.
    """
    known = {row.run_id: row.ended_s is None for row in records.now(_rows)}
    publications = [checkpoint.publication for checkpoint in catalogue(volume)]
    published = {p.collection for p in publications if p.kind == WEIGHTS}
    alive = {run_id for run_id, is_alive in known.items() if is_alive}
    return tuple(_resume(volume, run_id) for run_id in sorted(alive | (published - set(known))))


def _rows(session: Session) -> Sequence[RunRow]:
    return session.scalars(sa.select(RunRow)).all()


def _resume(volume: Volume, run_id: str) -> Resume:
    found = latest(volume, run_id, WEIGHTS, verify="full")
    skipped = tuple(f"{item.label}: {item.why}" for item in found.skipped)
    if found.checkpoint is None:
        return Resume(model_id=run_id, path=None, optimizer_step=None, skipped=skipped)
    ref = CheckpointRef(run_id=run_id, kind=WEIGHTS, name=found.checkpoint.publication.name)
    step = found.checkpoint.manifest.metadata.get("optimizer_step", "")
    return Resume(
        model_id=run_id,
        path=str(ref),
        optimizer_step=int(step) if step.isdecimal() else None,
        skipped=skipped,
    )
