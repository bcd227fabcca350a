"""SideStream: a second queue of a device, for copies to and from the host beside what the device computes.

Marks say what has to be done before what; memory that both queues use is kept by whoever uses this until its mark has
passed, or until the other queue waits for that. On a CPU there are no queues: everything is done when it is called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point in a queue."""

    event: torch.cuda.Event | None
    """None: on a CPU nothing is queued."""

    def wait(self) -> None:
        """Until the device has come there; other threads run meanwhile."""
        if self.event is not None:
            self.event.synchronize()


class SideStream:
    """One such queue."""

    def __init__(self, device: torch.device) -> None:
        """Make one of `device`."""
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def pins(self) -> bool:
        """Whether memory of the host has to be pinned, so that copies are queued."""
        return self._stream is not None

    def mark(self) -> Mark:
        """What the calling thread has queued so far, wherever it queues now."""
        if self._stream is None:
            return Mark(event=None)
        # Blocking: a thread that waits for the link leaves its core to the one that trains.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return Mark(event=event)

    def after(self, ready: Mark) -> AbstractContextManager[object]:
        """Queue here what is queued inside, once `ready` has passed."""
        if self._stream is None or ready.event is None:
            return nullcontext()
        self._stream.wait_event(ready.event)
        return torch.cuda.stream(self._stream)

    def hold_until(self, mark: Mark) -> None:
        """What the calling thread queues from now on begins when `mark` has passed; the thread itself goes on."""
        if mark.event is not None:
            torch.cuda.current_stream(self.device).wait_event(mark.event)

    def synchronize(self) -> None:
        """Wait until all that was queued here is done."""
        if self._stream is not None:
            self._stream.synchronize()
