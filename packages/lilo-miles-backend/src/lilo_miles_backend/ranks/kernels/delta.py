"""Which kernels of the gated delta net a device runs."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from lilo_engine.errors import InvalidRequest

from lilo_miles_backend.ranks.kernels.delta_kernels import DeltaKernels
from lilo_miles_backend.ranks.kernels.delta_reference import TorchDelta


def delta_kernels(device: torch.device) -> DeltaKernels:
    """flash-linear-attention's on a GPU, torch's elsewhere.

    Raises:
        InvalidRequest: it is not installed where there is a GPU; torch's form would take many times the memory.
    """
    if device.type != "cuda":
        return TorchDelta()
    if missing := [name for name in ("fla", "triton", "einops") if find_spec(name) is None]:
        raise InvalidRequest(
            f"gated delta nets need flash-linear-attention on a GPU, and {', '.join(missing)} cannot be imported; "
            "install lilo-miles-backend[gpu]"
        )
    # Only where it runs: importing it needs Triton, and takes seconds.
    from lilo_miles_backend.ranks.kernels.delta_fla import FlaDelta  # noqa: PLC0415

    return FlaDelta.on(device)
