"""DeviceMemory: the most that a rank's device has held during a batch, its size, and how fast it could compute."""

from __future__ import annotations

import resource
import sys

import torch
from lilo_definitions.gpus import bf16_flops_per_s


class DeviceMemory:
    """Watches one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Watch a device that computes in `dtype`."""
        self._device = device
        self.total_bytes: int | None = None
        """All of it; None on CPU, whose memory is shared."""
        self.peak_flops_per_s: float | None = None
        """Of dense products in that type, by the device's data sheet; None: not known."""
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self.total_bytes = found.total_memory
            if dtype == torch.bfloat16:
                self.peak_flops_per_s = bf16_flops_per_s(found.name)

    def begin(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Most that was allocated at once since `begin`.

        On a CPU it is the most that this process has ever had resident, since nobody counts its allocations.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return resident if sys.platform == "darwin" else resident * 1024
