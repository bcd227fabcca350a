"""Roster: every model an engine knows, resident or ended, and where its life stands. Pure.

    creating -> ready <-> suspending -> suspended -> ready        each of them -> ended

A suspended model has no slot: its state is a checkpoint until its client sends something again. Slots themselves are
`residency.py`'s. An ended model keeps the results that were not fetched, for a while: the error that ended it reaches
the client that waits, and one that comes back later is told how to go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from lilo_engine.errors import Gone, NotFound, Saturated
from lilo_engine.operations.ledger import Entry, Ledger, payload_bytes
from lilo_engine.operations.operation import CreateModel, ModelId, Operation, RequestId
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.window import Window

KEPT_ENDED = 1024
"""Ended models that are remembered; their clients have gone or know by then."""
MAX_ENDED_BYTES = 256 * 2**20
"""Of the results that clients of ended models have not fetched; those of the model that ended first go first."""


Phase: TypeAlias = Literal["creating", "ready", "suspending", "suspended", "ended"]

_STEPS: Mapping[Phase, frozenset[Phase]] = {
    "creating": frozenset({"ready", "ended"}),
    "ready": frozenset({"suspending", "ended"}),
    "suspending": frozenset({"ready", "suspended", "ended"}),
    "suspended": frozenset({"ready", "ended"}),
    "ended": frozenset(),
}
"""Every step of a model's life."""


@dataclass(slots=True, kw_only=True, eq=False)
class Model:
    """One model and all that was asked of it."""

    request: CreateModel
    ledger: Ledger
    creation: Entry
    phase: Phase = "creating"
    window: Window = field(default_factory=Window)
    active_s: float = 0.0
    """When something was last asked of it or finished, by the engine's clock."""
    loading: bool = False
    """Whether a checkpoint is being read for it: nothing of it may run before that was loaded."""
    kept: CheckpointRef | None = None
    """What the engine last saved of it by itself; that name is the engine's to overwrite."""
    creation_tries: int = 0
    """How often its creation was begun; a trainer lost in the middle leaves nothing of it."""
    last_checkpoint: CheckpointRef | None = None
    """The newest training checkpoint published while it was resident."""
    reason: str = ""
    """Why it ended."""

    @property
    def model_id(self) -> ModelId:
        """Its id."""
        return self.request.model_id

    @property
    def ended(self) -> bool:
        """Whether its life is over."""
        return self.phase == "ended"

    def move(self, to: Phase) -> None:
        """The next step of its life."""
        assert to in _STEPS[self.phase], f"{self.model_id} cannot go from {self.phase} to {to}"
        self.phase = to

    @property
    def to_be_made(self) -> CreateModel:
        """How its slot is filled: as it was asked for, or as it was when it was suspended."""
        if self.phase != "suspended":
            return self.request
        return replace(self.request, source=self.kept, with_optimizer=True)

    def gone(self) -> Gone:
        """What a client of the ended model is told."""
        return self.gone_with(self.reason)

    def gone_with(self, reason: str) -> Gone:
        """The same for a reason that is about to become its."""
        if self.last_checkpoint is not None:
            way = (
                f"its last checkpoint is {self.last_checkpoint}; create a training client from it "
                "with create_training_client_from_state_with_optimizer"
            )
        elif self.request.source is not None:
            way = (
                f"it had saved no state since it was created from {self.request.source}; "
                "create a training client from that again"
            )
        else:
            way = "it had saved no state; create a new training client"
        return Gone(f"{self.model_id} is gone: {reason}; {way}")


@dataclass(slots=True)
class Roster:
    """Models by id."""

    _resident: dict[ModelId, Model] = field(default_factory=dict[ModelId, Model])
    _ended: OrderedDict[ModelId, Model] = field(default_factory=OrderedDict[ModelId, Model])

    def add(self, model: Model) -> None:
        """A creation was asked for."""
        assert model.model_id not in self._resident, f"{model.model_id} is there already"
        self._resident[model.model_id] = model

    def end(self, model: Model, reason: str) -> None:
        """Its life is over; unfinished futures must have been failed, or finish on their own."""
        model.move("ended")
        model.reason = reason
        self._resident.pop(model.model_id, None)
        model.ledger.forget_fetched()
        self._ended[model.model_id] = model
        while len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)
        self._bound_results()

    def _bound_results(self) -> None:
        """Ended models stay known without their results, so that their clients are told how to go on."""
        held = sum(model.ledger.unfetched_bytes for model in self._ended.values())
        for model in self._ended.values():
            if held <= MAX_ENDED_BYTES:
                return
            held -= model.ledger.unfetched_bytes
            model.ledger.forget_results()

    def get(self, model_id: ModelId) -> Model | None:
        """A model, resident or ended."""
        return self._resident.get(model_id) or self._ended.get(model_id)

    def resident(self, model_id: ModelId) -> Model:
        """A model that takes operations: it has a slot or will get one.

        Raises:
            NotFound: there never was one, as far as is known.
            Gone: it ended.
        """
        model = self._resident.get(model_id)
        if model is not None:
            return model
        ended = self._ended.get(model_id)
        if ended is not None:
            raise ended.gone()
        raise NotFound(f"there is no model {model_id!r} here; create a training client first")

    def all_resident(self) -> list[Model]:
        """Models that take operations, with a slot or without, oldest first."""
        return list(self._resident.values())

    def all_ended(self) -> list[Model]:
        """Models whose life is over, as far as they are remembered; something of them may still run."""
        return list(self._ended.values())

    def check_owners_room(self, model: Model, operation: Operation) -> None:
        """Refuse an operation for which its owner, who has a limit, has no room.

        What the model's own parked operations wait for is let in, or they would wait for ever.

        Raises:
            Saturated: the unfinished operations of all the owner's models hold too much.
        """
        limit = model.request.max_waiting_bytes
        sequence = model.ledger.sequence
        if limit is None or (operation.seq_id == sequence.next and len(sequence)):
            return
        owner = model.request.owner
        theirs = (m for m in self._resident.values() if m.request.owner == owner)
        held = sum(m.ledger.unfinished_bytes for m in theirs)
        size = payload_bytes(operation)
        if held and held + size > limit:
            raise Saturated(
                f"the unfinished operations of this key hold {held} bytes, {size} more would exceed its limit of "
                f"{limit}; await results before sending more"
            )

    def entry(self, request_id: RequestId) -> tuple[Model, Entry]:
        """The model and entry of a future.

        Raises:
            NotFound, Gone: see `Ledger.find`.
        """
        model_id, _, number = request_id.rpartition(":")
        model = self.get(ModelId(model_id))
        if model is None or not (number.isascii() and number.isdigit()):
            raise no_such_request(request_id)
        try:
            return model, model.ledger.find(int(number))
        except Gone:
            if model.ended:
                raise model.gone() from None
            raise


def no_such_request(request_id: str) -> NotFound:
    """What is said of a future that is not there, whatever the reason."""
    return NotFound(
        f"there is no request {request_id!r} here; the server may have been restarted, which ends all models: create the "
        "client again, from its last checkpoint if there is one"
    )
