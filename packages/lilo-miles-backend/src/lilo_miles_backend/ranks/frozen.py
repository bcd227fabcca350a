"""Frozen: tensors as they were at one moment, for whoever publishes them while training goes on.

On a CPU they are copied at once. On a GPU they are copied on the GPU, which takes it milliseconds in the order of what
it computes anyway, and come to the host when they are asked for, by the thread that asks (`staging.py`). Where the copy
would take memory that a pass may need, they come at once, and training waits for them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch

from lilo_miles_backend.ranks.staging import Staging

_log = logging.getLogger(__name__)

ROOM_SHARE = 0.5
"""Of what the fullest pass leaves free, most that copies may take: the rest is the allocator's to lose in fragments."""

Named = Mapping[str, torch.Tensor]


class Frozen:
    """Tensors by name, still on the device perhaps; asked for once."""

    def __init__(self, fetch: Callable[[], dict[str, torch.Tensor]]) -> None:
        """`fetch` brings them; it is let go of with all it holds when it has."""
        self._fetch: Callable[[], dict[str, torch.Tensor]] | None = fetch

    def on_host(self) -> dict[str, torch.Tensor]:
        """All of them in the host's memory, by any thread.

        Raises:
            CommandFailed: there is no memory for them.
        """
        fetch, self._fetch = self._fetch, None
        assert fetch is not None, "what is frozen is fetched once"
        return fetch()


class Freezer:
    """Freezes tensors of one device; used by the thread that trains."""

    def __init__(self, staging: Staging | None, room: Callable[[], float]) -> None:
        """Freeze what lies on one device.

        Args:
            staging: the way from there to the host; None: it is the host.
            room: how many of the device's bytes nothing will need.
        """
        self._staging = staging
        self._room = room

    def freeze(self, named: Named) -> Frozen:
        """Copies that nothing changes any more, each with memory of its own on a CPU.

        Raises:
            CommandFailed: the host has no memory for them.
        """
        tensors = {name: tensor.detach() for name, tensor in named.items()}
        if self._staging is None or not tensors:
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            return Frozen(lambda: copies)
        flat = self._copy(tensors)
        if flat is None:
            found = _at_once(tensors, self._staging)
            return Frozen(lambda: found)
        return _later(flat, {name: tensor.shape for name, tensor in tensors.items()}, self._staging)

    def keep(self, tensor: torch.Tensor, name: str) -> Frozen:
        """A tensor that is nobody else's already: it lies on the device, and stays there if it would be copied."""
        if self._staging is None:
            return Frozen(lambda: {name: tensor})
        if not self._fits(tensor.nbytes, self._room() + tensor.nbytes):
            found = _at_once({name: tensor}, self._staging)
            return Frozen(lambda: found)
        return _later(tensor.reshape(-1), {name: tensor.shape}, self._staging)

    def _copy(self, tensors: Named) -> torch.Tensor | None:
        """All of them one after another on the device; None where there is no room."""
        needed = sum(tensor.nbytes for tensor in tensors.values())
        try:
            return joined(tensors) if self._fits(needed, self._room()) else None
        except torch.OutOfMemoryError:
            self._fits(needed, 0.0)
            return None

    def _fits(self, needed: float, room: float) -> bool:
        """Whether so many bytes may stay on the device until they are published; says so where not."""
        if needed <= ROOM_SHARE * room:
            return True
        _log.info(
            "training waits while %.2f GB are saved: the device has %.2f GB that no pass needs",
            needed / 1e9,
            room / 1e9,
        )
        return False


def joined(tensors: Named) -> torch.Tensor:
    """Tensors of one dtype as one, flat; at least one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def split(flat: torch.Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The reverse of `joined`."""
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def _at_once(tensors: Named, staging: Staging) -> dict[str, torch.Tensor]:
    return {
        name: staging.bring(tensor.reshape(-1), staging.mark()).view(tensor.shape)
        for name, tensor in tensors.items()
    }


def _later(flat: torch.Tensor, shapes: Mapping[str, torch.Size], staging: Staging) -> Frozen:
    ready = staging.mark()
    return Frozen(lambda: split(staging.bring(flat, ready), shapes))
