"""Transfer: arrays from the host to the device and back, without stopping the host where the device allows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lilo_miles_backend.ranks.rows import Array


def sent(array: Array, device: torch.device) -> torch.Tensor:
    """The array on the device; on a GPU the copy is queued, from pinned memory that outlives it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """Copies on their way to the host."""

    copies: list[torch.Tensor]
    done: torch.Event | None
    """None: they were there."""

    def wait(self) -> list[torch.Tensor]:
        """The copies, all that was queued before them done; what was queued after them may still run."""
        if self.done is not None:
            self.done.synchronize()
        return self.copies


def fetching(*tensors: torch.Tensor) -> Fetching:
    """Queue copies to the host."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return Fetching(copies=list(tensors), done=None)
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        for tensor in tensors
    ]
    done = torch.Event(tensors[0].device.type)
    done.record()
    return Fetching(copies=copies, done=done)


def fetched(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors on the host, all that was queued before them done: the one place where a batch waits."""
    return fetching(*tensors).wait()
