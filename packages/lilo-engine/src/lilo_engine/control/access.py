"""Access: whose things are whose, and who may do what with them. Pure, and the only file that decides it.

Everything that a client makes hangs off its session, and a session belongs to the owner of the key that made it:
models, runs, sampling sessions and futures follow by their ids, checkpoints by their run. `view.py` asks here before it
hands anything to a route; what a caller may not see is answered exactly as what is not there.

| | owner | a stranger | a stranger, if public | an operator |
|---|---|---|---|---|
| session, model, run, sampling session, future | all | nothing | - | its row in the console |
| checkpoint | all | nothing | read: load, sample, copy, download | nothing |
| metrics, timeline | its own share | its own share | - | all |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lilo_engine.errors import InvalidRequest

COMMON = ""
"""Owner of what was made before there were owners: every key's, as it was then."""
NOBODY = "?"
"""Owner of what is not there: no key can have it."""
_OWNER = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may ask for at most; None = no more than the server allows anyone."""

    rate_per_s: float | None = None
    """Requests that begin something, per second; polls and heartbeats are free."""
    max_body_bytes: int | None = None
    """Of one body, as sent and unpacked."""
    max_waiting_bytes: int | None = None
    """Of bodies that are being read, of operations that wait or run, and of samples: of each at most so much at a time."""

    @property
    def largest_body_bytes(self) -> int | None:
        """Of one body, by both limits."""
        limits = [
            each for each in (self.max_body_bytes, self.max_waiting_bytes) if each is not None
        ]
        return min(limits, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request: what its key says."""

    key_id: str
    owner: str
    operator: bool = False
    limits: KeyLimits = field(default_factory=KeyLimits)


def owns(caller: Caller, owner: str) -> bool:
    """Whether the caller may use and change what belongs to `owner`."""
    return owner in (caller.owner, COMMON)


def owners_of(caller: Caller) -> tuple[str, ...]:
    """Every owner for which `owns` is true."""
    return (caller.owner, COMMON)


def may_read(caller: Caller, owner: str, *, public: bool) -> bool:
    """Whether the caller may load, sample from, copy or download a checkpoint of `owner`."""
    return public or owns(caller, owner)


def may_watch(caller: Caller, owner: str) -> bool:
    """Whether the caller may see in a console what a model of `owner` does."""
    return caller.operator or owns(caller, owner)


def check_owner(owner: str) -> str:
    """Return `owner` if it can be one.

    Raises:
        InvalidRequest: it holds anything but letters, digits, `_`, `.` and `-`, or more than 64 of them.
    """
    if not _OWNER.fullmatch(owner):
        raise InvalidRequest(
            f"{owner!r} cannot be an owner; name a key's id or owner as `lilo keys list` shows it"
        )
    return owner
