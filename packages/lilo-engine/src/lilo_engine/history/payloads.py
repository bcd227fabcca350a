"""Payloads: the data of passes, and which of them belong into files because memory is short. Pure.

    waiting -> done -> given up          each of them in memory or, once it was written, in a segment

Large ones go to a file as soon as they have run. While too much is in memory, others follow: those that have run, the
oldest first, then those that wait, the last one first, since its turn is farthest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lilo_engine.history.record import DATUM_BYTES, Payload
from lilo_engine.history.segments import Place
from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import ForwardBackward, RequestId


def _unheard() -> None:
    """Nobody writes."""


def _none() -> OrderedDict[int, Payload]:
    return OrderedDict[int, Payload]()


@dataclass(slots=True, kw_only=True)
class Payloads:
    """Those of one engine."""

    max_memory_bytes: int
    eager_bytes: int
    on_change: Callable[[], None] = _unheard
    """Called when `to_write` or `take_released` may give something."""
    memory_bytes: int = 0
    """Of passes in memory now."""
    _parked: dict[RequestId, Payload] = field(default_factory=dict[RequestId, Payload])
    _waiting: OrderedDict[int, Payload] = field(default_factory=_none)
    """In memory, in the order of arrival."""
    _large: OrderedDict[int, Payload] = field(default_factory=_none)
    """In memory, done."""
    _small: OrderedDict[int, Payload] = field(default_factory=_none)
    """The same of those that are written only when memory is short."""
    _released: list[Place] = field(default_factory=list[Place])

    def park(self, entry: Entry) -> None:
        """A pass waits for its turn; everything else is small and not ours."""
        operation = entry.operation
        if not isinstance(operation, ForwardBackward) or entry.refusal is not None:
            return
        size = entry.payload_bytes + DATUM_BYTES * len(operation.datums)
        payload = Payload(entry=entry, size_bytes=size, operation=operation)
        self._parked[entry.request_id] = payload
        self._waiting[id(payload)] = payload
        self.memory_bytes += size
        self.on_change()

    def of(self, entry: Entry) -> Payload:
        """The data of a pass that has no result yet."""
        return self._parked[entry.request_id]

    def done(self, entry: Entry) -> Payload | None:
        """A pass has run, and its data is needed still; None if it was given up before."""
        payload = self._parked.pop(entry.request_id, None)
        if payload is None:
            return None
        payload.entry = None
        if self._waiting.pop(id(payload), None) is not None:
            large = payload.size_bytes >= self.eager_bytes
            (self._large if large else self._small)[id(payload)] = payload
            self.on_change()
        return payload

    def end(self, entry: Entry) -> None:
        """Something ended whose data is not needed any more; nothing happens if it had none."""
        payload = self._parked.pop(entry.request_id, None)
        if payload is not None:
            self.give_up(payload)

    def give_up(self, payload: Payload) -> None:
        """Its data is not needed any more."""
        payload.is_needed = False
        payload.entry = None
        self._leave_memory(payload)
        if payload.place is not None:
            self._released.append(payload.place)
            self.on_change()

    def to_write(self) -> Payload | None:
        """A pass that belongs into a file now; None if none does."""
        if self._large:
            return next(iter(self._large.values()))
        if self.memory_bytes <= self.max_memory_bytes:
            return None
        if self._small:
            return next(iter(self._small.values()))
        return next(reversed(self._waiting.values())) if self._waiting else None

    def written(self, payload: Payload, place: Place) -> None:
        """A pass is in a file: what of it lies in memory goes."""
        if not payload.is_needed:
            self._released.append(place)
            return
        payload.place = place
        entry = payload.entry
        if entry is not None and isinstance(entry.operation, ForwardBackward):
            # A schedule looks at its kind, tokens and key, which stay.
            entry.operation = replace(entry.operation, datums=())
        self._leave_memory(payload)

    def take_released(self) -> list[Place]:
        """Places in files that are not needed any more, each told once."""
        released, self._released = self._released, []
        return released

    def _leave_memory(self, payload: Payload) -> None:
        if payload.operation is None:
            return
        payload.operation = None
        self.memory_bytes -= payload.size_bytes
        for held in (self._waiting, self._large, self._small):
            held.pop(id(payload), None)
