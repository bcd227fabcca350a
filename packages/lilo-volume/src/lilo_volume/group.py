"""Group: the ranks that write one checkpoint together. The caller brings it; `SoloGroup` is the group of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


class Group(Protocol):
    """Collectives over all ranks. Every call takes a deadline; a dead peer is an error on all others."""

    @property
    def rank(self) -> int:
        """This process's index, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, value: T, *, timeout_s: float, step: str) -> list[T]:
        """Every rank's value, in rank order.

        Raises:
            GroupTimeout: a peer did not come in time; names `step` and the missing ranks.
        """
        ...

    def broadcast(self, value: T | None, *, timeout_s: float, step: str) -> T:
        """Rank 0's value on every rank; what other ranks pass is ignored."""
        ...

    def barrier(self, *, timeout_s: float, step: str) -> None:
        """Return when every rank has come."""
        ...


@dataclass(frozen=True, slots=True)
class SoloGroup:
    """The group of one rank: every collective returns at once."""

    rank: int = 0
    world_size: int = 1

    def all_gather(self, value: T, *, timeout_s: float, step: str) -> list[T]:
        """The value alone."""
        return [value]

    def broadcast(self, value: T | None, *, timeout_s: float, step: str) -> T:
        """The value itself."""
        assert value is not None, f"{step}: rank 0 broadcasts a value"
        return value

    def barrier(self, *, timeout_s: float, step: str) -> None:
        """Nothing to wait for."""
