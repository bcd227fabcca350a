"""Sequence: the numbering of one model's operations. Pure.

Numbers start at 1 and are taken in order, whatever order they arrive in; a missing one holds back all after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


def _unheard() -> None:
    """Nobody watches."""


@dataclass(slots=True)
class Sequence(Generic[T]):
    """Parks what arrives and gives it back in order."""

    next: int = 1
    """The number to be taken next; every smaller one was taken."""
    on_change: Callable[[], None] = _unheard
    """Called when `peek()` may give something else than before."""
    _parked: dict[int, T] = field(default_factory=dict[int, T])

    def __len__(self) -> int:
        """How many are parked, behind a gap or not."""
        return len(self._parked)

    def park(self, number: int, value: T) -> None:
        """Keep `value` until its number is taken; the number is neither taken nor parked yet."""
        assert number >= self.next, f"number {number} was taken already"
        assert number not in self._parked, f"number {number} is parked already"
        self._parked[number] = value
        if number == self.next:
            self.on_change()

    def peek(self, ahead: int = 0) -> T | None:
        """What `take` gives after `ahead` more calls; None at a gap or the end."""
        return self._parked.get(self.next + ahead)

    def take(self) -> T:
        """The next in order; there is one."""
        value = self._parked.pop(self.next)
        self.next += 1
        self.on_change()
        return value

    def missing(self) -> int | None:
        """The number that holds back what is parked; None when nothing is held back."""
        return self.next if self._parked and self.next not in self._parked else None

    def clear(self) -> list[T]:
        """Give up everything parked, in order of the numbers."""
        values = [self._parked[number] for number in sorted(self._parked)]
        self._parked.clear()
        self.on_change()
        return values
