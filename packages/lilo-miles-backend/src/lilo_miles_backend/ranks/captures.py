"""Captures: frozen adapter states between their capture and their publication.

Filled by the thread that trains, emptied by the threads that publish; what is inside is detached, so that the lock
guards the dictionary alone.
"""

from __future__ import annotations

import threading

from lilo_engine.commands.backend import CaptureKind
from lilo_engine.commands.command import CaptureId, Destination, Published
from lilo_engine.errors import NotFound
from lilo_volume.group import Group
from lilo_volume.volume import Volume

from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.checkpoints import persist_sampler, persist_training


class Captures:
    """This rank's part of all captures that are not published yet."""

    def __init__(self, volume: Volume, group: Group) -> None:
        self._volume = volume
        self._group = group
        self._lock = threading.Lock()
        self._waiting: dict[CaptureId, tuple[CaptureKind, AdapterState]] = {}

    def keep(self, capture_id: CaptureId, kind: CaptureKind, state: AdapterState) -> None:
        """Hold a frozen state until it is published."""
        with self._lock:
            self._waiting[capture_id] = (kind, state)

    def persist(self, capture_id: CaptureId, destination: Destination) -> Published:
        """Publish a capture and let go of it, whether that succeeds or not.

        Raises:
            NotFound: there is no such capture, or it was published before.
        """
        with self._lock:
            held = self._waiting.pop(capture_id, None)
        if held is None:
            raise NotFound(f"there is no capture {capture_id!r}; a capture can be persisted once")
        kind, state = held
        wanted = "training" if destination.kind == "weights" else "sampler"
        assert kind == wanted, f"a {kind} capture cannot become {destination.kind}"
        persist = persist_training if kind == "training" else persist_sampler
        return persist(self._volume, self._group, state, destination)
