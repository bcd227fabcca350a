"""Answers: what the passes of one batch find, kept on the device until all of them have run, then read once.

Every rank writes its own tokens' logprobs to their places in one flat array, zero elsewhere, and each item's loss; the
sums over the data- and context-parallel ranks, of which each token is on one, are everybody's. So a batch costs two
collectives and one copy to the host, whatever the number of its microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from lilo_engine.operations.tensor import Tensor

from lilo_miles_backend.ranks.collectives import Axis, sum_in_place
from lilo_miles_backend.ranks.microbatch import Microbatch
from lilo_miles_backend.ranks.transfer import fetched, sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one item."""

    logprobs: tuple[Tensor, ...]
    """float32, in the shapes of its datums' targets."""
    loss: float


class Answers:
    """Of the items of one batch."""

    def __init__(
        self, shapes: Sequence[Sequence[tuple[int, ...]]], device: torch.device, cp_dp: Axis
    ) -> None:
        """Make room.

        Args:
            shapes: of each item, of the targets of each of its rows.
            device: where passes compute.
            cp_dp: the ranks that have other tokens.
        """
        self._shapes = shapes
        self._axis = cp_dp
        sizes = [math.prod(shape) for item in shapes for shape in item]
        firsts = iter(accumulate(sizes, initial=0))
        self.firsts: tuple[tuple[int, ...], ...] = tuple(
            tuple(next(firsts) for _ in item) for item in shapes
        )
        """Of each item, where each row's first logprob goes."""
        self._flat = torch.zeros(sum(sizes), device=device)
        self._losses = torch.zeros(len(shapes), dtype=torch.float64, device=device)

    def put(self, microbatch: Microbatch, logprobs_nk: torch.Tensor) -> None:
        """The logprobs of a microbatch's tokens on this rank."""
        where, device = microbatch.answers_nk.reshape(-1), self._flat.device
        values = logprobs_nk.detach().reshape(-1).to(self._flat.dtype)
        if (where < 0).any():
            wanted = np.flatnonzero(where >= 0)
            where, values = where[wanted], values.index_select(0, sent(wanted, device))
        self._flat.index_copy_(0, sent(where, device), values)

    def add_loss(self, item: int, loss: torch.Tensor) -> None:
        """A part of an item's loss, float64 on the device."""
        self._losses[item] += loss

    def collect(self) -> list[Answer]:
        """Of all items, over all ranks, which call this together; waits for the device."""
        sum_in_place(self._flat, self._axis)
        sum_in_place(self._losses, self._axis)
        flat, losses = (part.numpy() for part in fetched(self._flat, self._losses))
        return [
            Answer(
                logprobs=tuple(
                    Tensor.of(flat[first : first + math.prod(shape)].reshape(shape), "float32")
                    for first, shape in zip(firsts, shapes, strict=True)
                ),
                loss=float(loss),
            )
            for firsts, shapes, loss in zip(self.firsts, self._shapes, losses, strict=True)
        ]
