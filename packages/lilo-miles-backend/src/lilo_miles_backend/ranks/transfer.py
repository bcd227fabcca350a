"""Transfer: arrays from the host to the device and back, without stopping the host where the device allows it."""

from __future__ import annotations

import torch

from lilo_miles_backend.ranks.rows import Array


def sent(array: Array, device: torch.device) -> torch.Tensor:
    """The array on the device; on a GPU the copy is queued, from pinned memory that outlives it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors on the host, all that was queued before them done: the one place where a batch waits."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        for tensor in tensors
    ]
    done = torch.Event(tensors[0].device.type)
    done.record()
    done.synchronize()
    return copies
