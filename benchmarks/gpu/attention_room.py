"""Ranks as threads of one process, on one device: what a collective gives is exact, what it would cost is missing."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lilo_miles_backend.ranks.collectives import ALONE, Axis


@dataclass
class Room:
    """Ranks that are threads of this process and exchange through its memory; collectives mean this while it is open."""

    size: int
    slots: list[Any] = field(default_factory=list[Any])
    real: dict[str, Any] = field(default_factory=dict[str, Any])

    def __enter__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)
        for name, ours in (("all_gather", _gather), ("reduce_scatter", _reduce)):
            for ending in ("_single", "_tensor" if name[0] == "r" else "_into_tensor"):
                if hasattr(dist, name + ending):
                    self.real[name + ending] = getattr(dist, name + ending)
                    setattr(dist, name + ending, ours)

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)

    def exchange(self, rank: int, mine: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, in rank order."""
        self.slots[rank] = mine
        self.barrier.wait()
        everybody = list(self.slots)
        self.barrier.wait()
        return everybody


def axis(room: Room | None, rank: int, size: int) -> Axis:
    """A rank's context-parallel axis; no room: alone, the others send what it has itself (for timing)."""
    if size == 1:
        return ALONE
    member: Any = Member(room, rank)
    return Axis(name="cp", rank=rank, size=size, group=member)


@dataclass(frozen=True)
class Member:
    """What stands for a process group."""

    room: Room | None
    rank: int


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


def _gather(output: torch.Tensor, mine: torch.Tensor, *, group: Member, **_: Any) -> _Done:
    parts = output.view(-1, *mine.shape)
    if group.room is None:
        parts.copy_(mine.expand(parts.shape))
    else:
        for one, sent in zip(parts, group.room.exchange(group.rank, mine), strict=True):
            one.copy_(sent)
    return _Done()


def _reduce(output: torch.Tensor, whole: torch.Tensor, *, group: Member, **_: Any) -> _Done:
    everybody = [whole] if group.room is None else group.room.exchange(group.rank, whole)
    parts = [one.view(-1, *output.shape)[group.rank] for one in everybody]
    wide = torch.promote_types(output.dtype, torch.float32)
    output.copy_(torch.stack(parts).sum(0, dtype=wide))
    if group.room is not None:
        group.room.barrier.wait()
    return _Done()
