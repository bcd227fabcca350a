"""OffloadedInputs: the inputs of the layers, waiting in the host's memory between forward and backward.

Forward: a layer's input is copied out while the layer computes, and let go of when the next layer begins. Backward: an
input is copied in while the layer above computes. The device holds two at a time, whatever the number of layers, and
waits only where the link is slower than a layer. Used by the layers of one model (`layer.py`), in their order and back.

No stream records memory of the other. What the copies read and write is allocated by the stream that computes, and that
stream is told to wait for a copy before the memory is let go of or used: so it can be allocated again at once, however
far the host is ahead. On a CPU the same steps are plain copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lilo_miles_backend.ranks.side_stream import Mark, SideStream


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """An input on the device, and the copy of it that is under way."""

    index: int
    x: torch.Tensor
    copied: Mark


class OffloadedInputs:
    """Those of the microbatch that runs; buffers are kept from one to the next."""

    def __init__(self, side: SideStream, *, usual_bytes: int) -> None:
        """Copy over `side`; buffers have `usual_bytes`, which the largest input takes."""
        self._side = side
        self._usual_bytes = usual_bytes
        self._buffers: list[torch.Tensor] = []
        self._away: list[torch.Tensor] = []
        """Of the layers that ran forward and not yet back: where the input of each is."""
        self._here: _Here | None = None

    def begin(self) -> None:
        """A microbatch begins; of one that failed half-way nothing is left."""
        self._let_go()
        self._away.clear()

    def put(self, x: torch.Tensor) -> int:
        """Copy out the input of the next layer, which nobody may write to before it is taken; its number, for `take`."""
        self._let_go()
        index = len(self._away)
        away = self._buffer(index, x)
        with self._side.after(self._side.mark()):
            away.copy_(x, non_blocking=True)
            copied = self._side.mark()
        self._away.append(away)
        self._here = _Here(index=index, x=x, copied=copied)
        return index

    def take(self, index: int) -> torch.Tensor:
        """The input of the last layer that was not taken yet, the caller's own from now on; fetches the one before it."""
        assert index == len(self._away) - 1, "layers go back in the order in which they came"
        if self._here is None or self._here.index != index:
            self._here = self._fetched(index)
        here, self._here = self._here, None
        self._side.hold_until(here.copied)
        self._away.pop()
        if index > 0:
            self._here = self._fetched(index - 1)
        return here.x

    def _fetched(self, index: int) -> _Here:
        away = self._away[index]
        x = torch.empty(away.shape, dtype=away.dtype, device=self._side.device)
        # Not before what was queued with the memory that `x` has got.
        with self._side.after(self._side.mark()):
            x.copy_(away, non_blocking=True)
            copied = self._side.mark()
        return _Here(index=index, x=x, copied=copied)

    def _let_go(self) -> None:
        """Of the input that is here; its memory may be written to when its copy is done."""
        if self._here is not None:
            self._side.hold_until(self._here.copied)
            self._here = None

    def _buffer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Memory of the host for the input of the layer of this number."""
        if index == len(self._buffers):
            self._buffers.append(self._pinned(x.nbytes))
        elif self._buffers[index].nbytes < x.nbytes:
            self._buffers[index] = self._pinned(x.nbytes)
        return self._buffers[index][: x.nbytes].view(x.dtype).view(x.shape)

    def _pinned(self, size: int) -> torch.Tensor:
        size = max(size, self._usual_bytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._side.pins)
