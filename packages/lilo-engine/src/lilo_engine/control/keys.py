"""API keys: made, listed, revoked, and checked on every request. Only their SHA-256 is kept.

A key is 32 random bytes, so that a plain digest suffices. Another process may add or revoke keys while a server
runs (`lilo keys`): the server looks again when it meets an unknown key, and at every sweep.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.records import KeyRow, Records
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


class Keys:
    """The keys of one data folder."""

    def __init__(self, records: Records) -> None:
        """Read the keys that are valid."""
        self._records = records
        self._digests: tuple[str, ...] = records.now(_valid)
        self._looked_s = 0.0

    def create(self, name: str, now_s: float, *, key: str | None = None) -> str:
        """Store a key, a new random one if none is given, and return it; it cannot be shown again.

        Raises:
            InvalidRequest: the given key is not one that the SDK would send.
        """
        secret = key if key is not None else f"{PREFIX}{secrets.token_hex(32)}"
        if not secret.startswith(PREFIX) or len(secret) < len(PREFIX) + 4 or not secret.isascii():
            raise InvalidRequest(
                f"an API key starts with {PREFIX!r}, followed by at least 4 ASCII characters; "
                "leave it out to have one made"
            )
        self._records.now(lambda session: _store(session, name, _digest(secret), now_s))
        self._digests = self._records.now(_valid)
        return secret

    def any(self) -> bool:
        """Whether there is a valid key."""
        return bool(self._digests)

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
        self._digests = self._records.now(_valid)

    async def accepts(self, key: str, now_s: float) -> bool:
        """Whether the key is valid; compares against every digest in constant time."""
        digest = _digest(key)
        if self._known(digest):
            return True
        if now_s - self._looked_s < _LOOK_AGAIN_S:
            return False
        await self.look_again(now_s)
        return self._known(digest)

    async def look_again(self, now_s: float) -> None:
        """Read the keys that are valid now."""
        self._looked_s = now_s
        self._digests = await self._records.run(_valid)

    def _known(self, digest: str) -> bool:
        known = False
        for each in self._digests:
            known |= hmac.compare_digest(each, digest)
        return known


class Door:
    """Keys with a clock: what the HTTP layer asks."""

    def __init__(self, keys: Keys, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._clock = clock

    async def accepts(self, key: str) -> bool:
        """Whether the key is valid now."""
        return await self._keys.accepts(key, self._clock())


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def _valid(session: Session) -> tuple[str, ...]:
    return tuple(session.scalars(sa.select(KeyRow.digest).where(KeyRow.revoked_s.is_(None))))


def _store(session: Session, name: str, digest: str, now_s: float) -> None:
    row = session.scalar(sa.select(KeyRow).where(KeyRow.digest == digest))
    if row is None:
        key_id = secrets.token_hex(4)
        session.add(
            KeyRow(key_id=key_id, name=name, digest=digest, created_s=now_s, revoked_s=None)
        )
    else:
        row.revoked_s = None


def _listed(session: Session) -> list[Key]:
    rows = session.scalars(sa.select(KeyRow).order_by(KeyRow.created_s))
    return [
        Key(key_id=r.key_id, name=r.name, created_s=r.created_s, revoked_s=r.revoked_s)
        for r in rows
    ]
