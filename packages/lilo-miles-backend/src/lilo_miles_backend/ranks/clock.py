"""Clock: seconds between two points of a rank's work, as the device sees them, without waiting for it.

On a GPU the host runs ahead: a point is an event in the device's queue, which is read once everything before it is
done. On a CPU there is nothing to run ahead of.
"""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

Point: TypeAlias = "float | torch.Event"


class Clock:
    """Takes points in time on one device."""

    def __init__(self, device: torch.device) -> None:
        """Take times of what runs on this device."""
        self._device = device

    def now(self) -> Point:
        """The point that the work queued so far ends at."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(start: Point, end: Point) -> float:
        """Between two points, both passed: the caller has read a result that was queued after them."""
        if isinstance(start, torch.Event):
            assert isinstance(end, torch.Event), "points of one clock are of one kind"
            return start.elapsed_time(end) / 1e3
        assert isinstance(end, float), "points of one clock are of one kind"
        return end - start
