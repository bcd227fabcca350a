"""Checkpoints: the index of what is published. Manifests on the volume decide; this answers quickly.

At start the index is made equal to the volume's catalogue (`rebuild.py`), so that it may be deleted at any time. A
lifetime that is changed later lies beside the manifest. What the index alone knows is which checkpoints are public.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import anyio.to_thread
import sqlalchemy as sa
from lilo_volume import (
    Checkpoint,
    CheckpointMissing,
    NameTaken,
    Target,
    Volume,
    adopt,
    open_named,
    remove,
    set_expiry,
)
from lilo_volume.manifest import attempt_folder
from sqlalchemy.orm import Session

from lilo_engine.commands.command import Published
from lilo_engine.control.rebuild import NO_END_MS, look_up, rebuild, row_of, run_of
from lilo_engine.control.records import Records
from lilo_engine.control.tables import CheckpointRow, RunRow
from lilo_engine.errors import InvalidRequest, NotFound
from lilo_engine.operations.ids import session_of
from lilo_engine.operations.operation import SaveSampler, SaveState
from lilo_engine.operations.reference import CheckpointKind, CheckpointRef

_log = logging.getLogger(__name__)


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
    public: bool
    """Every key of this server may read it."""
    owner: str
    spec: Mapping[str, str]
    """The manifest's metadata: base model, shape of the adapter, optimizer step."""
    user_metadata: Mapping[str, str]


class Checkpoints:
    """The published checkpoints of one volume."""

    def __init__(self, records: Records, volume: Volume) -> None:
        """Answer from the index as it is."""
        self._records = records
        self._volume = volume

    def take_over(self) -> None:
        """Begin as the engine's process: make the index equal to the volume."""
        found = look_up(self._volume)
        self._records.now(lambda session: rebuild(session, found))
        _log.info("%d published checkpoints found", len(found))

    async def published(
        self, operation: SaveState | SaveSampler, published: Published, now_s: float
    ) -> None:
        """Index what was just published, from its manifest."""
        ref = CheckpointRef(run_id=published.run_id, kind=published.kind, name=published.name)
        checkpoint = await anyio.to_thread.run_sync(self._open, ref)
        row = row_of(checkpoint)
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
        entry = await self.find(ref)
        if entry is None:
            raise NotFound(no_checkpoint(ref, await self.of_run(ref.run_id)))
        return entry

    async def find(self, ref: CheckpointRef) -> Entry | None:
        """One checkpoint; None if it is not published, or not any more."""
        key = (ref.run_id, ref.kind, ref.name)
        row = await self._records.run(lambda session: session.get(CheckpointRow, key))
        return None if row is None else _entry(row)

    async def of_run(self, run_id: str) -> list[Entry]:
        """Named checkpoints of a run, newest first."""
        query = _named().where(CheckpointRow.run_id == run_id)
        return await self._records.run(lambda session: _entries(session, query))

    async def listed(
        self, owners: Sequence[str], limit: int, offset: int
    ) -> tuple[list[Entry], int]:
        """Named checkpoints of these owners, newest first, and how many there are."""
        query = _named().where(CheckpointRow.owner.in_(owners))

        def work(session: Session) -> tuple[list[Entry], int]:
            total = session.scalar(sa.select(sa.func.count()).select_from(query.subquery()))
            return _entries(session, query.limit(limit).offset(offset)), total or 0

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
        """Change when a checkpoint ends; None = never. Kept on the volume, beside the manifest.

        Raises:
            NotFound: it is not published.
        """
        await self.get(ref)
        await anyio.to_thread.run_sync(self._mark_lifetime, ref, expires_s)
        await self._change(ref, "expires_s", expires_s)

    async def set_public(self, ref: CheckpointRef, public: bool) -> None:
        """Let every key of this server read a checkpoint, or its owner alone.

        Raises:
            NotFound: it is not published.
        """
        await self.get(ref)
        await self._change(ref, "public", public)

    async def files(self, ref: CheckpointRef) -> Checkpoint:
        """A checkpoint as the volume has it, with its files.

        Raises:
            NotFound: it is not published.
        """
        await self.get(ref)
        return await anyio.to_thread.run_sync(self._open, ref)

    async def copy(
        self,
        source: CheckpointRef,
        run_id: str,
        *,
        owner: str,
        expires_s: float | None,
        now_s: float,
    ) -> Entry:
        """Publish a checkpoint again, as one of another run, which is `owner`'s; the same copy again does nothing.

        Raises:
            NotFound: the source is not published.
            InvalidRequest: the run has something else of that name.
        """
        await self.get(source)
        ref = CheckpointRef(run_id=run_id, kind=source.kind, name=source.name)
        copied = await anyio.to_thread.run_sync(self._copy, source, ref, owner, expires_s)
        row = row_of(copied)
        row.created_s, row.expires_s = now_s, expires_s

        def work(session: Session) -> None:
            if session.get(RunRow, run_id) is None:
                session.add(run_of(row, f"it is a copy of {source}; create a model from it"))
            session.merge(row)

        await self._records.run(work)
        return await self.get(ref)

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

    async def _change(self, ref: CheckpointRef, column: str, value: float | bool | None) -> None:
        key = (ref.run_id, ref.kind, ref.name)

        def work(session: Session) -> None:
            row = session.get(CheckpointRow, key)
            if row is not None:
                setattr(row, column, value)

        await self._records.run(work)

    def _mark_lifetime(self, ref: CheckpointRef, expires_s: float | None) -> None:
        checkpoint = self._open(ref)
        # Without a mark the lifetime in the manifest counts, so "never" has to be said where there is one.
        stated = "ttl_s" in checkpoint.manifest.metadata
        never = NO_END_MS if stated else None
        set_expiry(
            self._volume, checkpoint, never if expires_s is None else round(expires_s * 1000)
        )

    def _copy(
        self, source: CheckpointRef, ref: CheckpointRef, owner: str, expires_s: float | None
    ) -> Checkpoint:
        original = self._open(source)
        dropped = ("ttl_s", "sampling_session_id")
        metadata = {k: v for k, v in original.manifest.metadata.items() if k not in dropped}
        metadata["copied_from"] = f"{source}@{original.publication.attempt}"
        metadata["session_id"] = session_of(ref.run_id)
        metadata["owner"] = owner
        target = Target(
            collection=ref.run_id, kind=ref.kind, name=ref.name, order=1, metadata=metadata
        )
        try:
            copied = adopt(self._volume, attempt_folder(original.publication), target)
        except NameTaken as error:
            copied = self._open(ref)
            if copied.manifest.metadata.get("copied_from") != metadata["copied_from"]:
                raise InvalidRequest(
                    f"{ref} is taken by something else than a copy of {source}; choose another model_seq_id"
                ) from error
        if expires_s is not None:
            set_expiry(self._volume, copied, round(expires_s * 1000))
        return copied

    def _open(self, ref: CheckpointRef) -> Checkpoint:
        # The publisher has just digested the files; reading them all again would double its cost.
        return open_named(self._volume, ref.run_id, ref.kind, ref.name, verify="size")

    def _remove(self, ref: CheckpointRef) -> None:
        try:
            remove(self._volume, self._open(ref))
        except CheckpointMissing:
            _log.info("%s was gone from the volume already", ref)


def no_checkpoint(ref: CheckpointRef, others: Iterable[Entry]) -> str:
    """What to answer for a checkpoint that is not there, or not for the caller.

    Args:
        ref: It.
        others: Named ones of its run that the caller may see.
    """
    there = [str(entry.ref) for entry in others if entry.ref.kind == ref.kind]
    known = f"its run has {', '.join(there[:5])}" if there else "its run has none of this kind"
    return f"there is no checkpoint {ref}; {known}"


def _named() -> sa.Select[Any]:
    # The key decides between equals: PostgreSQL has no order of its own from page to page.
    key = (CheckpointRow.run_id, CheckpointRow.kind, CheckpointRow.name)
    newest = (CheckpointRow.created_s.desc(), CheckpointRow.position.desc())
    return sa.select(CheckpointRow).where(~CheckpointRow.unnamed).order_by(*newest, *key)


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
        public=row.public,
        owner=row.owner,
        spec=row.spec,
        user_metadata=row.user_metadata,
    )
