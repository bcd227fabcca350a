"""Device: where this rank computes and what its collectives travel over; chosen once, at start.

Everything else takes a `Device`; nothing else names `cuda` or a communication backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's device."""

    torch_device: torch.device
    collectives: Literal["gloo"]
    """The torch.distributed backend."""
    description: str
    """For people: `cpu (1 thread)`."""

    @classmethod
    def cpu(cls, *, threads: int) -> Device:
        """The CPU, with `threads` torch threads for this process."""
        torch.set_num_threads(threads)
        plural = "" if threads == 1 else "s"
        return cls(
            torch_device=torch.device("cpu"),
            collectives="gloo",
            description=f"cpu ({threads} thread{plural})",
        )
