"""API keys: made, listed, revoked, and checked on every request. Only their SHA-256 is kept.

A key is 32 random bytes, so that a plain digest suffices. Its id follows from it, so that a key that is given again to a
server that lost its records still sees what it made: manifests name its owner. Another process may add or revoke keys
while a server runs (`lilo keys`): the server looks again when it meets an unknown key, and at every sweep.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.access import Caller, KeyLimits, check_owner
from lilo_engine.control.records import Records
from lilo_engine.control.tables import CheckpointRow, KeyRow, RunRow
from lilo_engine.errors import InvalidRequest, NotFound

PREFIX = "tml-"
"""The SDK refuses keys that start otherwise."""
_LOOK_AGAIN_S = 1.0
"""Least time between looks for unknown keys, so that guessing does not become SQL load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key as it is listed: never the key itself."""

    key_id: str
    name: str
    created_s: float
    revoked_s: float | None
    owner: str
    operator: bool
    limits: KeyLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Valid:
    digest: str
    caller: Caller


class Keys:
    """The keys of one data folder."""

    def __init__(self, records: Records) -> None:
        """Read the keys that are valid."""
        self._records = records
        self._valid: tuple[_Valid, ...] = records.now(_valid)
        self._looked_s = 0.0

    def create(
        self,
        name: str,
        now_s: float,
        *,
        key: str | None = None,
        owner: str | None = None,
        operator: bool = False,
        limits: KeyLimits | None = None,
    ) -> str:
        """Store a key, a new random one if none is given, and return it; it cannot be shown again.

        Args:
            name: Whose it is, for people.
            now_s: Unix seconds.
            key: One that is known already becomes valid again, and keeps its owner and limits.
            owner: Id or owner of another key, or an owner that things here have: it sees the same. None: its own.
            operator: Whether it may watch everything.
            limits: Its own; None: those of the server.

        Raises:
            InvalidRequest: the given key is not one that the SDK would send, or nothing here has that owner.
        """
        secret = key if key is not None else f"{PREFIX}{secrets.token_hex(32)}"
        if not secret.startswith(PREFIX) or len(secret) < len(PREFIX) + 4 or not secret.isascii():
            raise InvalidRequest(
                f"an API key starts with {PREFIX!r}, followed by at least 4 ASCII characters; "
                "leave it out to have one made"
            )
        row = _row(secret, name, now_s, limits or KeyLimits(), operator=operator)

        def work(session: Session) -> None:
            if owner is not None:
                row.owner = _known_owner(session, owner)
            _store(session, row)

        self._records.now(work)
        self._valid = self._records.now(_valid)
        return secret

    def any(self) -> bool:
        """Whether there is a valid key."""
        return bool(self._valid)

    def listed(self) -> list[Key]:
        """All keys, oldest first, revoked ones too."""
        return self._records.now(_listed)

    def revoke(self, key_id: str, now_s: float) -> None:
        """End a key.

        Raises:
            NotFound: there is no such key.
        """

        def work(session: Session) -> None:
            row = session.get(KeyRow, key_id)
            if row is None:
                raise NotFound(f"there is no key {key_id!r}; `lilo keys list` shows them")
            row.revoked_s = row.revoked_s or now_s

        self._records.now(work)
        self._valid = self._records.now(_valid)

    async def caller(self, key: str, now_s: float) -> Caller | None:
        """Whose request it is; None if the key is not valid."""
        digest = _digest(key)
        found = self._find(digest)
        if found is not None or now_s - self._looked_s < _LOOK_AGAIN_S:
            return found
        await self.look_again(now_s)
        return self._find(digest)

    async def look_again(self, now_s: float) -> None:
        """Read the keys that are valid now."""
        self._looked_s = now_s
        self._valid = await self._records.run(_valid)

    def _find(self, digest: str) -> Caller | None:
        """Compares against every digest in constant time."""
        found: Caller | None = None
        for each in self._valid:
            if hmac.compare_digest(each.digest, digest):
                found = each.caller
        return found


class Door:
    """Keys with a clock: what the HTTP layer asks."""

    def __init__(self, keys: Keys, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._clock = clock

    async def caller(self, key: str) -> Caller | None:
        """Whose request it is; None if the key is not valid now."""
        return await self._keys.caller(key, self._clock())


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def _key_id(key: str) -> str:
    """Not a part of the digest: it is shown, in manifests too."""
    return _digest(f"id of {key}")[:12]


def _row(key: str, name: str, now_s: float, limits: KeyLimits, *, operator: bool) -> KeyRow:
    return KeyRow(
        key_id=_key_id(key),
        name=name,
        digest=_digest(key),
        created_s=now_s,
        revoked_s=None,
        owner=_key_id(key),
        operator=operator,
        rate_per_s=limits.rate_per_s,
        max_body_bytes=limits.max_body_bytes,
        max_waiting_bytes=limits.max_waiting_bytes,
    )


def _valid(session: Session) -> tuple[_Valid, ...]:
    rows = session.scalars(sa.select(KeyRow).where(KeyRow.revoked_s.is_(None)))
    return tuple(_Valid(digest=row.digest, caller=_caller(row)) for row in rows)


def _caller(row: KeyRow) -> Caller:
    return Caller(key_id=row.key_id, owner=row.owner, operator=row.operator, limits=_limits(row))


def _limits(row: KeyRow) -> KeyLimits:
    return KeyLimits(
        rate_per_s=row.rate_per_s,
        max_body_bytes=row.max_body_bytes,
        max_waiting_bytes=row.max_waiting_bytes,
    )


def _store(session: Session, new: KeyRow) -> None:
    row = session.scalar(sa.select(KeyRow).where(KeyRow.digest == new.digest))
    if row is None:
        session.add(new)
    else:
        row.revoked_s = None
        row.operator = row.operator or new.operator


def _known_owner(session: Session, wanted: str) -> str:
    """The owner of the key of this id, or one that something here has.

    Raises:
        InvalidRequest: there is neither.
    """
    check_owner(wanted)
    key = session.get(KeyRow, wanted)
    if key is not None:
        return key.owner
    for table in (KeyRow, RunRow, CheckpointRow):
        if session.scalar(sa.select(table.owner).where(table.owner == wanted).limit(1)) is not None:
            return wanted
    raise InvalidRequest(
        f"no key has the id {wanted!r} and nothing here belongs to it; `lilo keys list` shows ids and owners"
    )


def _listed(session: Session) -> list[Key]:
    rows = session.scalars(sa.select(KeyRow).order_by(KeyRow.created_s))
    return [
        Key(
            key_id=row.key_id,
            name=row.name,
            created_s=row.created_s,
            revoked_s=row.revoked_s,
            owner=row.owner,
            operator=row.operator,
            limits=_limits(row),
        )
        for row in rows
    ]
