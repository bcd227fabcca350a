"""Checkpoints: the index of what is published. Manifests on the volume decide; this answers quickly.

At start the index is made equal to the volume's catalogue, so that it may be deleted at any time. What the index
knows beyond the manifests is only a lifetime that was changed after publishing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import anyio.to_thread
import sqlalchemy as sa
from lilo_volume import Checkpoint, CheckpointMissing, Volume, catalogue, open_named, remove
from sqlalchemy.orm import Session

from lilo_engine.commands.command import Published
from lilo_engine.control.records import CheckpointRow, Records, RunRow
from lilo_engine.errors import InvalidRequest, NotFound
from lilo_engine.operations.ids import session_of
from lilo_engine.operations.lora_metadata import lora_from_metadata
from lilo_engine.operations.operation import LoraSpec, SaveSampler, SaveState
from lilo_engine.operations.reference import CheckpointKind, CheckpointRef

_log = logging.getLogger(__name__)

_UNKNOWN = LoraSpec(
    lora_rank=0, alpha=0.0, seed=None, train_attn=False, train_mlp=False, train_unembed=False
)
"""Of a run whose manifests do not describe an adapter: one odd checkpoint must not keep a server from starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A published checkpoint as the index knows it."""

    ref: CheckpointRef
    attempt: str
    folder: str
    size_bytes: int
    created_s: float
    expires_s: float | None
    unnamed: bool
    """A snapshot made for a sampling session; not listed."""
    spec: Mapping[str, str]
    """The manifest's metadata: base model, shape of the adapter, optimizer step."""
    user_metadata: Mapping[str, str]


class Checkpoints:
    """The published checkpoints of one volume."""

    def __init__(self, records: Records, volume: Volume) -> None:
        """Make the index equal to the volume."""
        self._records = records
        self._volume = volume
        found = catalogue(volume)
        records.now(lambda session: _rebuild(session, found))
        _log.info("%d published checkpoints found", len(found))

    async def published(
        self, operation: SaveState | SaveSampler, published: Published, now_s: float
    ) -> None:
        """Index what was just published, from its manifest."""
        ref = CheckpointRef(run_id=published.run_id, kind=published.kind, name=published.name)
        checkpoint = await anyio.to_thread.run_sync(self._open, ref)
        row = _row(checkpoint)
        row.created_s = now_s
        row.unnamed = isinstance(operation, SaveSampler) and (
            operation.sampling_session_id is not None
        )
        row.expires_s = None if operation.ttl_s is None else now_s + operation.ttl_s
        row.user_metadata = dict(operation.user_metadata)
        await self._records.run(lambda session: session.merge(row))

    async def get(self, ref: CheckpointRef) -> Entry:
        """One checkpoint.

        Raises:
            NotFound: it is not published, or not any more; the message lists what the run has.
        """
        key = (ref.run_id, ref.kind, ref.name)
        row = await self._records.run(lambda session: session.get(CheckpointRow, key))
        if row is None:
            raise NotFound(await self._missing(ref))
        return _entry(row)

    async def of_run(self, run_id: str) -> list[Entry]:
        """Named checkpoints of a run, newest first."""
        query = _named().where(CheckpointRow.run_id == run_id)
        return await self._records.run(lambda session: _entries(session, query))

    async def listed(self, limit: int, offset: int) -> tuple[list[Entry], int]:
        """Named checkpoints of all runs, newest first, and how many there are."""

        def work(session: Session) -> tuple[list[Entry], int]:
            total = session.scalar(sa.select(sa.func.count()).select_from(_named().subquery()))
            return _entries(session, _named().limit(limit).offset(offset)), total or 0

        return await self._records.run(work)

    async def unnamed_of(self, run_id: str) -> list[Entry]:
        """Snapshots without a name of a run, newest first."""
        query = (
            sa.select(CheckpointRow)
            .where(CheckpointRow.run_id == run_id, CheckpointRow.unnamed)
            .order_by(CheckpointRow.position.desc())
        )
        return await self._records.run(lambda session: _entries(session, query))

    async def runs_with_more_unnamed_than(self, count: int) -> list[str]:
        """Runs that have more snapshots without a name."""
        query = (
            sa.select(CheckpointRow.run_id)
            .where(CheckpointRow.unnamed)
            .group_by(CheckpointRow.run_id)
            .having(sa.func.count() > count)
        )
        return await self._records.run(lambda session: list(session.scalars(query)))

    async def expired(self, now_s: float) -> list[Entry]:
        """Checkpoints whose lifetime is over."""
        query = sa.select(CheckpointRow).where(CheckpointRow.expires_s <= now_s)
        return await self._records.run(lambda session: _entries(session, query))

    async def set_lifetime(self, ref: CheckpointRef, expires_s: float | None) -> None:
        """Change when a checkpoint ends; None = never.

        Raises:
            NotFound: it is not published.
        """
        await self.get(ref)
        key = (ref.run_id, ref.kind, ref.name)

        def work(session: Session) -> None:
            row = session.get(CheckpointRow, key)
            if row is not None:
                row.expires_s = expires_s

        await self._records.run(work)

    async def delete(self, ref: CheckpointRef) -> None:
        """Remove a checkpoint from the volume, then from the index.

        Raises:
            NotFound: it is not published.
        """
        await self.get(ref)
        await anyio.to_thread.run_sync(self._remove, ref)
        key = (ref.run_id, ref.kind, ref.name)

        def work(session: Session) -> None:
            row = session.get(CheckpointRow, key)
            if row is not None:
                session.delete(row)

        await self._records.run(work)

    def _open(self, ref: CheckpointRef) -> Checkpoint:
        # The publisher has just digested the files; reading them all again would double its cost.
        return open_named(self._volume, ref.run_id, ref.kind, ref.name, verify="size")

    def _remove(self, ref: CheckpointRef) -> None:
        try:
            remove(self._volume, self._open(ref))
        except CheckpointMissing:
            _log.info("%s was gone from the volume already", ref)

    async def _missing(self, ref: CheckpointRef) -> str:
        there = [str(e.ref) for e in await self.of_run(ref.run_id) if e.ref.kind == ref.kind]
        known = f"its run has {', '.join(there[:5])}" if there else "its run has none of this kind"
        return f"there is no checkpoint {ref}; {known}"


def _named() -> sa.Select[Any]:
    return (
        sa.select(CheckpointRow)
        .where(~CheckpointRow.unnamed)
        .order_by(CheckpointRow.created_s.desc(), CheckpointRow.position.desc())
    )


def _entries(session: Session, query: sa.Select[Any]) -> list[Entry]:
    return [_entry(row) for row in session.scalars(query)]


def _entry(row: CheckpointRow) -> Entry:
    kind = cast(CheckpointKind, row.kind)
    return Entry(
        ref=CheckpointRef(run_id=row.run_id, kind=kind, name=row.name),
        attempt=row.attempt,
        folder=row.folder,
        size_bytes=row.size_bytes,
        created_s=row.created_s,
        expires_s=row.expires_s,
        unnamed=row.unnamed,
        spec=row.spec,
        user_metadata=row.user_metadata,
    )


def _row(checkpoint: Checkpoint) -> CheckpointRow:
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
        created_s=manifest.created_unix_ms / 1000,
        expires_s=_expiry(manifest.metadata, manifest.created_unix_ms / 1000),
        unnamed="sampling_session_id" in manifest.metadata,
        spec=dict(manifest.metadata),
        user_metadata=_user_metadata(manifest.metadata),
    )


def _expiry(metadata: Mapping[str, str], created_s: float) -> float | None:
    ttl_s = metadata.get("ttl_s", "")
    return created_s + int(ttl_s) if ttl_s.isdigit() else None


def _user_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        parsed: object = json.loads(metadata.get("user_metadata", "{}"))
    except ValueError:
        return {}
    if not isinstance(parsed, dict):
        return {}
    return {str(k): str(v) for k, v in cast("dict[object, object]", parsed).items()}


def _rebuild(session: Session, found: list[Checkpoint]) -> None:
    """Rows for every manifest, none without one; a lifetime changed after publishing is kept."""
    rows = {
        (row.run_id, row.kind, row.name): row for row in (_row(checkpoint) for checkpoint in found)
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
    for row in rows.values():
        if session.get(RunRow, row.run_id) is None:
            session.add(_run_of(row))
            session.flush()


def _run_of(row: CheckpointRow) -> RunRow:
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
        user_metadata={},
        created_s=row.created_s,
        last_request_s=row.created_s,
        ended_s=row.created_s,
        end_reason="the server was stopped",
    )
