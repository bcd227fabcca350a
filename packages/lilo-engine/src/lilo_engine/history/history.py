"""History: what was done to each model since the newest snapshot of it, so that its state could be made again. Pure.

    submitted -> done -> covered by a snapshot, and forgotten

Restoring the newest snapshot (`base`) and repeating what was done since (`done`), in its plans, gives the state that
a lost trainer had. When what no snapshot covers takes more than `uncovered_bytes`, the engine takes a snapshot of its
own, of the model that `heaviest` names. The passes of a window that is still open are in no snapshot: they are kept
until a step closes it and another snapshot follows. A window that grows beyond the same limits by itself is let go, and
its model's state can be made again only from the next snapshot on. Belongs to the engine's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lilo_engine.history.payloads import Payloads
from lilo_engine.history.record import DATUM_BYTES, Base, Done, Pass, PlanRecord, Step
from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import CreateModel, LoadState, ModelId, OptimStep
from lilo_engine.operations.reference import CheckpointRef

_AGAIN = 1.25
"""After a snapshot of the engine's own failed, the next one is tried when so much more is uncovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """How much is kept, and where it lies."""

    memory_bytes: int = 256 * 2**20
    """Of passes in memory, those that wait and those that have run; beyond it they lie in files."""
    eager_bytes: int = 2**20
    """A pass of this size goes to a file as soon as it has run: it is written in milliseconds and read hardly ever."""
    uncovered_bytes: int = 2**30
    """Of what no snapshot covers, of all models; beyond it the engine takes a snapshot of its own."""
    uncovered_operations: int = 16384
    """The same as a number of one model's operations: each takes some memory, however small it is."""


@dataclass(slots=True)
class _Kept:
    """One model."""

    base: Base
    done: list[Done] = field(default_factory=list[Done])
    size_bytes: int = 0
    not_before_bytes: float = 0
    not_before_operations: float = 0
    last_step: int = 0
    """Number of the newest step, or of a load after it: only what was captured since has the state that is there now."""
    window_bytes: int = 0
    window_passes: int = 0
    """Of the open window."""
    lost_until: float = 0
    """What was done up to this number is not kept, and no snapshot has it; infinite while its window is open."""

    def add(self, done: Done) -> None:
        self.done.append(done)
        self.size_bytes += _size(done)
        if isinstance(done, Pass):
            self.window_bytes += _size(done)
            self.window_passes += 1

    def close_window(self) -> None:
        self.window_bytes = self.window_passes = 0
        if self.lost_until == math.inf:
            self.lost_until = self.last_step

    def put_off(self) -> None:
        self.not_before_bytes = _AGAIN * self.size_bytes
        self.not_before_operations = _AGAIN * len(self.done)


@dataclass(slots=True)
class History:
    """The models of one engine."""

    settings: HistorySettings
    payloads: Payloads
    uncovered_bytes: int = 0
    """Of everything that no snapshot covers."""
    _models: dict[ModelId, _Kept] = field(default_factory=dict[ModelId, _Kept])
    _long: dict[ModelId, None] = field(default_factory=dict[ModelId, None])
    """Models with more uncovered operations than they may have."""
    _marks: dict[str, tuple[_Kept, int]] = field(default_factory=dict[str, tuple[_Kept, int]])
    """Capture -> whose it is, and the number of the last step that is in it."""
    _plans: int = 0

    @classmethod
    def empty(cls, settings: HistorySettings) -> History:
        """Of no models yet."""
        payloads = Payloads(
            max_memory_bytes=settings.memory_bytes, eager_bytes=settings.eager_bytes
        )
        return cls(settings, payloads)

    # What is done.

    def opened(self, request: CreateModel) -> None:
        """A model was made: everything is done to what it is now."""
        base = Base(source=request.source, with_optimizer=request.with_optimizer)
        self._models[request.model_id] = _Kept(base)

    def forget(self, model_id: ModelId) -> None:
        """A model ended."""
        kept = self._models.pop(model_id, None)
        if kept is not None:
            self._cut(kept, len(kept.done))
            self._long.pop(model_id, None)

    def planned(self, entries: Sequence[Entry], reason: str) -> PlanRecord:
        """A plan is carried out."""
        self._plans += 1
        ids = tuple(entry.request_id for entry in entries)
        return PlanRecord(number=self._plans, request_ids=ids, reason=reason)

    def passed(self, model_id: ModelId, entry: Entry, plan: PlanRecord) -> None:
        """A pass added its gradients: it is kept until a snapshot covers it."""
        payload = self.payloads.done(entry)
        if payload is None:
            return
        kept = self._models.get(model_id)
        if kept is None or kept.lost_until == math.inf:
            self.payloads.give_up(payload)
            return
        self._add(model_id, Pass(seq_id=entry.seq_id, plan=plan, payload=payload))
        too_large = kept.window_bytes > self.settings.uncovered_bytes
        if too_large or kept.window_passes > self.settings.uncovered_operations:
            self._cut(kept, len(kept.done))
            kept.lost_until = math.inf

    def stepped(self, operation: OptimStep, plan: PlanRecord) -> None:
        """A step was done."""
        kept = self._models.get(operation.model_id)
        if kept is None:
            return
        kept.last_step = operation.seq_id
        if kept.lost_until < math.inf:
            done = Step(seq_id=operation.seq_id, plan=plan, operation=operation)
            self._add(operation.model_id, done)
        kept.close_window()

    def dropped(self, model_id: ModelId) -> None:
        """The gradients of the open window were dropped, so its passes had no effect."""
        kept = self._models.get(model_id)
        if kept is None:
            return
        while kept.done and isinstance(kept.done[-1], Pass):
            self._leave(kept, kept.done.pop())
        kept.close_window()

    def loaded(self, operation: LoadState) -> None:
        """The state is a checkpoint's: nothing that was done before matters."""
        kept = self._models.get(operation.model_id)
        if kept is not None:
            self._cut(kept, len(kept.done))
            kept.close_window()
            kept.last_step = operation.seq_id
            kept.lost_until = 0
            kept.base = Base(source=operation.source, with_optimizer=operation.with_optimizer)

    # Snapshots.

    def captured(self, capture: str, model_id: ModelId) -> None:
        """A training state was frozen: it has every step that was done."""
        kept = self._models.get(model_id)
        if kept is not None:
            self._marks[capture] = kept, kept.last_step

    def not_captured(self, model_id: ModelId) -> None:
        """A state could not be frozen: the next try waits until more is uncovered."""
        kept = self._models.get(model_id)
        if kept is not None:
            kept.put_off()

    def published(self, capture: str, source: CheckpointRef | None) -> None:
        """What was captured is durable under this path; None: it could not be saved."""
        kept, seq_id = self._marks.pop(capture, (None, 0))
        if kept is None:
            return
        if source is None:
            kept.put_off()
            return
        # Nothing is left of what came before a load that came between.
        count = sum(done.seq_id <= seq_id for done in kept.done)
        finds = 0 < kept.lost_until <= seq_id
        if count or finds:
            self._cut(kept, count)
            kept.base = Base(source=source, with_optimizer=True)
            kept.not_before_bytes = kept.not_before_operations = 0
        if finds:
            kept.lost_until = 0

    def lose_trainer(self) -> None:
        """Captures are gone; what was done is not."""
        self._marks.clear()

    def heaviest(self, able: Callable[[ModelId], bool]) -> ModelId | None:
        """The model that a snapshot would free most of, of those that can have one now, if too much is uncovered.

        What others hold, who are in the middle of a window, is not counted: no snapshot would free it, and of the rest as
        much may be uncovered as if they were not there.
        """
        for model_id in self._long:
            kept = self._models[model_id]
            if len(kept.done) >= kept.not_before_operations and able(model_id):
                return model_id
        left_bytes = self.uncovered_bytes
        if left_bytes <= self.settings.uncovered_bytes:
            return None
        for model_id, kept in sorted(self._models.items(), key=_heavier, reverse=True):
            if kept.size_bytes >= kept.not_before_bytes and able(model_id):
                return model_id
            left_bytes -= kept.size_bytes
            if left_bytes <= self.settings.uncovered_bytes:
                return None
        return None

    # Doing it again.

    def is_kept(self, model_id: ModelId) -> bool:
        """Whether `base` and `done` give the state that the model has."""
        return self._models[model_id].lost_until == 0

    def base(self, model_id: ModelId) -> Base:
        """What the operations of `done` start from."""
        return self._models[model_id].base

    def done(self, model_id: ModelId) -> tuple[Done, ...]:
        """What was done since then, in order."""
        return tuple(self._models[model_id].done)

    # Parts.

    def _add(self, model_id: ModelId, done: Done) -> None:
        kept = self._models[model_id]
        kept.add(done)
        self.uncovered_bytes += _size(done)
        if len(kept.done) > self.settings.uncovered_operations:
            self._long[model_id] = None

    def _cut(self, kept: _Kept, count: int) -> None:
        for done in kept.done[:count]:
            self._leave(kept, done)
        del kept.done[:count]
        for model_id in [m for m in self._long if self._models.get(m) is kept]:
            del self._long[model_id]

    def _leave(self, kept: _Kept, done: Done) -> None:
        kept.size_bytes -= _size(done)
        self.uncovered_bytes -= _size(done)
        if isinstance(done, Pass):
            self.payloads.give_up(done.payload)


def _heavier(one: tuple[ModelId, _Kept]) -> int:
    return one[1].size_bytes


def _size(done: Done) -> int:
    return done.payload.size_bytes if isinstance(done, Pass) else DATUM_BYTES
