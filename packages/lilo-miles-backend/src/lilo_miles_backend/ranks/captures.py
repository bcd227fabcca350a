"""Captures: what this rank holds of frozen adapters between their capture and their publication.

    keep      by the thread that trains, which goes on at once: on a GPU what is kept may still lie there (`frozen.py`)
    persist   by the threads that publish: a training state by all ranks together, a snapshot by rank 0 alone

What is inside is never changed, so that the lock guards the dictionary alone. Where it waits, in the host's memory or
as files on the volume, is `trainer.captures` of the definition.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lilo_engine.commands.backend import CaptureKind
from lilo_engine.commands.command import CaptureId, Destination, Published
from lilo_engine.errors import CommandFailed, NotFound
from lilo_volume import Group, SoloGroup, Volume

from lilo_miles_backend.adapter_state import AdapterState, tensors_by_part
from lilo_miles_backend.checkpoints import persist_sampler, persist_training
from lilo_miles_backend.checkpoints.capture_files import CaptureFiles
from lilo_miles_backend.checkpoints.outcome import done_alike
from lilo_miles_backend.checkpoints.publication import TIMEOUT_S
from lilo_miles_backend.checkpoints.translate import volume_errors
from lilo_miles_backend.ranks.frozen import Frozen


@dataclass(frozen=True, slots=True)
class _Held:
    kind: CaptureKind
    state: AdapterState
    """Without its tensors, which wait elsewhere."""
    frozen: Frozen | None
    """Where they wait, if not in a file."""


class Captures:
    """This rank's part of all captures that are not published yet."""

    def __init__(
        self,
        volume: Volume,
        group: Group,
        *,
        layout: Mapping[str, int],
        files: CaptureFiles | None = None,
    ) -> None:
        """Publish on `volume` together with the ranks of `group`.

        Args:
            volume: this node's view of where checkpoints are published.
            group: all ranks of the trainer; used by one thread at a time.
            layout: degrees by axis, noted in what is published.
            files: where captures wait; None: in memory.
        """
        self._volume = volume
        self._group = group
        self._layout = layout
        self._files = files
        self._lock = threading.Lock()
        self._waiting: dict[CaptureId, _Held] = {}

    def keep(
        self,
        capture_id: CaptureId,
        kind: CaptureKind,
        state: AdapterState,
        frozen: Frozen,
    ) -> None:
        """Hold a frozen state until it is published.

        Args:
            capture_id: what it will be asked for by.
            kind: what it will become.
            state: all but its tensors.
            frozen: those, by `PART.NAME`.

        Raises:
            CommandFailed: it could not be written to where captures wait.
        """
        held = _Held(kind, state, frozen)
        if self._files is not None:
            try:
                self._files.put(capture_id, frozen.on_host())
            except OSError as error:
                raise CommandFailed(str(error)) from error
            held = _Held(kind, state, None)
        with self._lock:
            self._waiting[capture_id] = held

    def persist(self, capture_id: CaptureId, destination: Destination) -> Published:
        """Publish a capture and let go of it, whether that succeeds or not.

        A training capture is published by all ranks, which call this in the same order; a sampler capture by the rank
        that holds it, beside anything else.

        Raises:
            NotFound: there is no such capture, or it was published before.
            InvalidRequest, CommandFailed: nothing was published; see `persist_training` and `persist_sampler`.
        """
        alone = destination.kind != "weights"
        group = SoloGroup() if alone else self._group
        try:
            with volume_errors():
                state = done_alike(
                    group,
                    lambda: self._taken(capture_id, "sampler" if alone else "training"),
                    step=f"take capture {capture_id}",
                    timeout_s=TIMEOUT_S,
                )
            if alone:
                return persist_sampler(self._volume, group, state, destination)
            return persist_training(self._volume, group, state, destination, layout=self._layout)
        finally:
            if self._files is not None:
                self._files.forget(capture_id)

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._waiting.clear()
        if self._files is not None:
            self._files.close()

    def _taken(self, capture_id: CaptureId, wanted: CaptureKind) -> AdapterState:
        with self._lock:
            held = self._waiting.pop(capture_id, None)
        if held is None:
            raise NotFound(f"there is no capture {capture_id!r}; a capture can be persisted once")
        assert held.kind == wanted, f"a {held.kind} capture cannot become one for {wanted}"
        if held.frozen is not None:
            return replace(held.state, **tensors_by_part(held.frozen.on_host()))
        assert self._files is not None, "a capture that is not frozen is in a file"
        try:
            tensors = self._files.take(capture_id)
        except OSError as error:
            raise CommandFailed(str(error)) from error
        return replace(held.state, **tensors_by_part(tensors))
