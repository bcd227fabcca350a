"""Staging: the way of large tensors from a GPU to the host, beside whatever the GPU computes.

Copies go over a stream of their own through two pinned buffers: while one is filled, the other is emptied into plain
memory. So no memory is ever pinned for a transfer, which takes the driver longer than the transfer itself, and the
stream that computes waits for nothing. Used by the threads that publish, one at a time.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from lilo_engine.errors import CommandFailed

from lilo_miles_backend.ranks.side_stream import Mark, SideStream

CHUNK_BYTES = 32 << 20
"""Of one buffer: long enough for the link's full speed, short enough to be forgotten in the host's memory."""


class Staging:
    """The buffers of one device."""

    def __init__(self, side: SideStream, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Pin the buffers; nobody else copies over `side`, and `chunk_bytes` is a multiple of the largest element."""
        self._side = side
        self._chunk_bytes = chunk_bytes
        self._buffers = [
            torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._side.pins)
            for _ in range(2)
        ]
        self._alone = threading.Lock()

    def mark(self) -> Mark:
        """What the calling thread has queued on the device so far."""
        return self._side.mark()

    def bring(self, flat: torch.Tensor, ready: Mark) -> torch.Tensor:
        """A copy of a contiguous 1-D tensor in the host's memory; waits for it, and for nothing that comes after it.

        Args:
            flat: on the device; nobody writes to it any more, until this has returned.
            ready: when it has been written.

        Raises:
            CommandFailed: the host has no memory for it.
        """
        host = _room_for(flat)
        most = self._chunk_bytes // flat.element_size()
        flying: deque[tuple[torch.Tensor, torch.Tensor, Mark]] = deque()
        with self._alone, self._side.after(ready):
            try:
                pieces = zip(host.split(most), flat.split(most), strict=True)
                for index, (target, source) in enumerate(pieces):
                    if len(flying) == len(self._buffers):
                        _land(*flying.popleft())
                    buffer = self._buffers[index % len(self._buffers)].view(flat.dtype)
                    buffer = buffer[: source.numel()]
                    buffer.copy_(source, non_blocking=True)
                    flying.append((target, buffer, self._side.mark()))
                while flying:
                    _land(*flying.popleft())
            finally:
                # The tensor's memory belongs to the stream that computes, which may write to it as soon as it is let go of.
                self._side.synchronize()
        return host


def _land(target: torch.Tensor, buffer: torch.Tensor, arrived: Mark) -> None:
    arrived.wait()
    target.copy_(buffer)


def _room_for(flat: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty(flat.shape, dtype=flat.dtype)
    except RuntimeError as error:
        raise CommandFailed(
            f"the host has no memory for {flat.nbytes} bytes that came from the device: {error}"
        ) from error
