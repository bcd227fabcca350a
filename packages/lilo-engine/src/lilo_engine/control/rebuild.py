"""Rebuild: rows of the index from manifests, and of the runs that made them, so that the records may be deleted."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import sqlalchemy as sa
from lilo_volume import Checkpoint, Volume, catalogue, expiry
from sqlalchemy.orm import Session

from lilo_engine.control.access import COMMON
from lilo_engine.control.tables import CheckpointRow, RunRow
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.ids import session_of
from lilo_engine.operations.lora_metadata import lora_from_metadata
from lilo_engine.operations.operation import LoraSpec

_log = logging.getLogger(__name__)

NO_END_MS = 253_402_300_799_000
"""The last second of the year 9999: a lifetime that was taken back, where the manifest states one."""

_TTL = re.compile("[0-9]{1,12}")
_UNKNOWN = LoraSpec(
    lora_rank=0, alpha=0.0, seed=None, train_attn=False, train_mlp=False, train_unembed=False
)
"""Of a run whose manifests do not describe an adapter: one odd checkpoint must not keep a server from starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A published checkpoint, and the end of its life as set after publishing, in Unix milliseconds."""

    checkpoint: Checkpoint
    changed_ms: int | None


def look_up(volume: Volume) -> list[Found]:
    """Everything published on a volume."""
    return [
        Found(checkpoint=checkpoint, changed_ms=expiry(volume, checkpoint))
        for checkpoint in catalogue(volume)
    ]


def row_of(checkpoint: Checkpoint) -> CheckpointRow:
    """What the manifest alone says."""
    where, manifest = checkpoint.publication, checkpoint.manifest
    return CheckpointRow(
        run_id=where.collection,
        kind=where.kind,
        name=where.name,
        attempt=where.attempt,
        folder=str(checkpoint.folder),
        position=where.order,
        size_bytes=checkpoint.size_bytes,
        digest=manifest.digest,
        created_s=_time(manifest.created_unix_ms / 1000),
        expires_s=_expiry(manifest.metadata, manifest.created_unix_ms / 1000),
        unnamed="sampling_session_id" in manifest.metadata,
        public=False,
        owner=manifest.metadata.get("owner", COMMON),
        spec=dict(manifest.metadata),
        user_metadata=_user_metadata(manifest.metadata),
    )


def _found_row(found: Found) -> CheckpointRow:
    """What the volume says, a lifetime changed after publishing included."""
    row = row_of(found.checkpoint)
    if found.changed_ms is not None:
        row.expires_s = None if found.changed_ms >= NO_END_MS else found.changed_ms / 1000
    return row


def _expiry(metadata: Mapping[str, str], created_s: float) -> float | None:
    ttl_s = metadata.get("ttl_s", "")
    return _time(created_s + int(ttl_s)) if _TTL.fullmatch(ttl_s) else None


def _time(unix_s: float) -> float:
    """A time that can be told as a date."""
    return min(unix_s, NO_END_MS / 1000)


def _user_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        parsed: object = json.loads(metadata.get("user_metadata", "{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(parsed, dict):
        return {}
    return {str(k): str(v) for k, v in cast("dict[object, object]", parsed).items()}


def _can_be_kept(row: CheckpointRow) -> bool:
    """Whether a database takes the texts of a row; those of a run that are made from it too.

    A manifest of somebody else's may hold any. Columns of JSON take all of them.
    """
    texts = (row.run_id, row.kind, row.name, row.owner, row.spec.get("base_model", ""))
    odd = [text for text in texts if "\x00" in text or not _is_unicode(text)]
    if odd:
        _log.warning("checkpoint in %s is left out: %r is no text of ours", row.folder, odd[0])
    return not odd


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def rebuild(session: Session, found: Sequence[Found]) -> None:
    """Rows for every manifest, none without one; what only the index knows is kept."""
    rows = {
        (row.run_id, row.kind, row.name): row for row in map(_found_row, found) if _can_be_kept(row)
    }
    known = {
        (row.run_id, row.kind, row.name): row for row in session.scalars(sa.select(CheckpointRow))
    }
    for key, row in known.items():
        if key not in rows or rows[key].attempt != row.attempt:
            session.delete(row)
    session.flush()
    for key, row in rows.items():
        if key not in known or known[key].attempt != row.attempt:
            session.add(row)
        else:
            known[key].expires_s = row.expires_s
    for row in rows.values():
        if session.get(RunRow, row.run_id) is None:
            session.add(run_of(row))
            session.flush()


def run_of(row: CheckpointRow, end_reason: str = "the server was stopped") -> RunRow:
    """What a checkpoint tells of the run that made it."""
    try:
        lora = lora_from_metadata(row.spec)
    except InvalidRequest as error:
        _log.warning("run %s: %s", row.run_id, error)
        lora = _UNKNOWN
    return RunRow(
        run_id=row.run_id,
        session_id=session_of(row.run_id),
        base_model=row.spec.get("base_model", ""),
        lora_rank=lora.lora_rank,
        alpha=lora.alpha,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        source=None,
        owner=row.owner,
        user_metadata={},
        created_s=row.created_s,
        last_request_s=row.created_s,
        ended_s=row.created_s,
        end_reason=end_reason,
    )
