"""TorchGroup: the ranks of a torch.distributed job, over a process group of its own, with real deadlines.

Not the job's own process group: a collective of the training must not wait for storage, and a barrier around storage
must not be ended by the training's watchdog. Needs `torch.distributed.init_process_group` to have been called.

Every rank notes its arrival in the job's store and waits there for the others, so that each call has its own deadline
and knows who is missing; the values then cross by gloo. They are pickled, as torch's own object collectives do: ranks
of one torch job trust each other already.
"""

from __future__ import annotations

import importlib
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from lilo_volume.config import node_id
from lilo_volume.errors import RankLost

T = TypeVar("T")
_LEAST_S = 0.001
"""The store takes no limit of zero."""


def torch_group(
    *, ranks: Sequence[int] | None = None, node: str | None = None, timeout_s: float = 300.0
) -> TorchGroup:
    """Make a group; called by every rank of the job, also by those that are not among `ranks`.

    Args:
        ranks: of the job, who take part; all of them if it is not given.
        node: which node this process is on; told by `node_id` if it is not given.
        timeout_s: limit of meeting here.

    Raises:
        RankLost: a rank did not come.
    """
    dist: Any = importlib.import_module("torch.distributed")
    process_group = dist.new_group(
        ranks=None if ranks is None else list(ranks),
        backend="gloo",
        timeout=timedelta(seconds=timeout_s),
    )
    assert process_group is not dist.GroupMember.NON_GROUP_MEMBER, "this rank is not among `ranks`"
    group = TorchGroup(process_group)
    group.introduce(node or node_id(), timeout_s)
    return group


class TorchGroup:
    """One rank's end; made by `torch_group`."""

    def __init__(self, process_group: Any) -> None:  # noqa: ANN401 - torch is loaded lazily
        """Over a gloo `torch.distributed.ProcessGroup` that nothing else uses."""
        self._group = process_group
        # A clone: a wait on it blocks no other user of the job's store.
        self._store: Any = process_group.get_group_store().clone()
        self._number = 0
        self._failure: Exception | None = None
        self._nodes = ("",) * self.world_size

    @property
    def rank(self) -> int:
        """This process's index in the group, from 0."""
        return int(self._group.rank())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._group.size())

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each rank."""
        return self._nodes

    def introduce(self, node: str, timeout_s: float) -> None:
        """Tell the others where this rank is."""
        self._nodes = tuple(self.all_gather(node, timeout_s=timeout_s, step="rendezvous"))

    def all_gather(self, value: T, *, timeout_s: float, step: str) -> list[T]:
        """Every rank's value, in rank order.

        Raises:
            RankLost: ranks did not come in time, or the connection to them broke; every later collective raises it.
            AssertionError: the ranks took different paths.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._meet(value, time.monotonic() + timeout_s, timeout_s, step)
        except Exception as error:
            self._failure = error
            raise

    def broadcast(self, value: T | None, *, timeout_s: float, step: str) -> T:
        """Rank 0's value on every rank; returns when all have come."""
        mine = value if self.rank == 0 else None
        return cast("T", self.all_gather(mine, timeout_s=timeout_s, step=step)[0])

    def barrier(self, *, timeout_s: float, step: str) -> None:
        """Return when every rank has come."""
        self.all_gather(None, timeout_s=timeout_s, step=step)

    def _meet(self, value: T, deadline: float, timeout_s: float, step: str) -> list[T]:
        self._number += 1
        data = pickle.dumps((step, value))
        sizes = self._arrive(len(data), deadline, timeout_s, step)
        try:
            parts = self._exchange(data, sizes, deadline)
        except RuntimeError as error:
            others = tuple(rank for rank in range(self.world_size) if rank != self.rank)
            raise self._lost(step, others, f"one of them is gone: {error}") from error
        outcomes = [pickle.loads(part) for part in parts]
        steps = {rank: outcome[0] for rank, outcome in enumerate(outcomes)}
        assert len(set(steps.values())) == 1, f"the ranks took different paths: {steps}"
        return [outcome[1] for outcome in outcomes]

    def _arrive(self, size: int, deadline: float, timeout_s: float, step: str) -> list[int]:
        """Note the arrival and wait for all; the size of each rank's value."""
        keys = [f"lilo-volume/{self._number}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.set(keys[self.rank], str(size))
            limit = max(_LEAST_S, deadline - time.monotonic())
            try:
                self._store.wait(keys, timedelta(seconds=limit))
            except RuntimeError:
                missing = tuple(r for r, key in enumerate(keys) if not self._store.check([key]))
                if missing:
                    why = f"did not come within {timeout_s:g} s"
                    raise self._lost(step, missing, why) from None
            sizes = [int(self._store.get(key)) for key in keys]
            self._forget()
        except RuntimeError as error:
            raise self._lost(step, (0,), f"the job's store does not answer: {error}") from error
        return sizes

    def _forget(self) -> None:
        """Take this rank's note of two collectives ago away: everybody has read it, or would not be here."""
        if self._number > 2:
            self._store.delete_key(f"lilo-volume/{self._number - 2}/{self.rank}")

    def _exchange(self, data: bytes, sizes: list[int], deadline: float) -> list[bytes]:
        """All ranks' bytes, by one gloo all-gather of the longest."""
        torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
        longest = max(sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everything = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        work = dist.all_gather(everything, mine, group=self._group, async_op=True)
        work.wait(timedelta(seconds=max(_LEAST_S, deadline - time.monotonic())))
        return [part[:size].numpy().tobytes() for part, size in zip(everything, sizes, strict=True)]

    def _lost(self, step: str, ranks: tuple[int, ...], why: str) -> RankLost:
        return RankLost(step, ranks, tuple(self._nodes[rank] for rank in ranks), why)
