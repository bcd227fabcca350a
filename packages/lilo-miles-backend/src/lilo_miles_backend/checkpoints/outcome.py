"""Outcome: what ranks do together ends in the same way on all of them, also with errors of the engine.

lilo-volume agrees on its own errors (`done_by_every_rank`); this is the same for errors that a user must see as they
are, as "it does not fit this model".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lilo_engine.errors import LiloError
from lilo_volume import Group

T = TypeVar("T")


class PeerFailed(RuntimeError):
    """Another rank failed in a way that is no user's error: the group is out of step and must end."""


def done_alike(group: Group, action: Callable[[], T], *, step: str, timeout_s: float) -> T:
    """Run `action` on every rank of `group`; return this rank's value when all have one.

    Raises:
        LiloError: that of the lowest rank that had one, on every rank.
        PeerFailed: another rank raised something else; that rank raises it itself.
    """
    mine = _attempted(action)
    if isinstance(mine, _Broken):
        group.all_gather(mine.text, timeout_s=timeout_s, step=step)
        raise mine.error
    failure = mine if isinstance(mine, LiloError) else None
    outcomes: list[LiloError | str | None] = group.all_gather(
        failure, timeout_s=timeout_s, step=step
    )
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, str):
            raise PeerFailed(f"rank {rank} failed to {step}: {outcome}")
    for outcome in outcomes:
        if isinstance(outcome, LiloError):
            raise outcome
    assert isinstance(mine, _Value), "a rank without a value has failed"
    return mine.value


@dataclass(frozen=True, slots=True)
class _Value(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _Broken:
    error: Exception

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def _attempted(action: Callable[[], T]) -> _Value[T] | LiloError | _Broken:
    try:
        return _Value(action())
    except LiloError as error:
        return error
    except Exception as error:  # the other ranks wait for this one, whatever happened
        return _Broken(error)
