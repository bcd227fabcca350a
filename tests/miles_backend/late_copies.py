"""A side stream whose copies are as late as a GPU's may be: done when somebody has to wait for them, and not before.

Memory that a copy will write holds NaN until then, and memory that it will read must still be held: what is let go of
before somebody waited, or written to, or read too early, is found on a CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from lilo_miles_backend.ranks.side_stream import Mark, SideStream
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True, kw_only=True)
class LateMark(Mark):
    """A point among the copies."""

    side: LateSideStream
    number: int

    def wait(self) -> None:
        self.side.catch_up(self.number)


class LateSideStream(SideStream):
    """Copies wait in a queue, in their order."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._queue: deque[tuple[_Memory, _Memory]] = deque()
        self._done = 0
        self.late = 0
        """Copies that were not done when they were asked for."""

    def mark(self) -> Mark:
        return LateMark(event=None, side=self, number=self._done + len(self._queue))

    def after(self, ready: Mark) -> Any:
        return _Queueing(self)

    def hold_until(self, mark: Mark) -> None:
        mark.wait()

    def synchronize(self) -> None:
        self.catch_up(self._done + len(self._queue))

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        assert target.nbytes == source.nbytes, "a copy of another size or type"
        if target.data_ptr() not in [one.address for pair in self._queue for one in pair]:
            target.fill_(math.nan)
        self._queue.append((_Memory(target), _Memory(source)))
        self.late += 1

    def catch_up(self, number: int) -> None:
        """Do the copies before this one."""
        while self._done < number:
            target, source = self._queue.popleft()
            assert not target.is_gone, "let go of before it was written"
            assert not source.is_gone, "let go of before it was read"
            ctypes.memmove(target.address, source.address, source.size)
            self._done += 1


class _Memory:
    """Of a contiguous tensor, which this does not hold."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.address, self.size = tensor.data_ptr(), tensor.nbytes
        self._storage = StorageWeakRef(tensor.untyped_storage())

    @property
    def is_gone(self) -> bool:
        return self._storage.expired()


class _Queueing(TorchDispatchMode):
    def __init__(self, side: LateSideStream) -> None:
        super().__init__()
        self._side = side

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is not asked to be queued is a copy from host to host.
        if func is torch.ops.aten.copy_.default and (*args, False)[2]:
            self._side.put(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))
