"""Ledger: all operations of one model and their futures. Pure: waiting on a future is `waiting.py`'s.

    submitted -> parked (waits for its number) -> taken (runs) -> finished -> fetched -> forgotten

A result stays fetchable after it was fetched, because the reply can be lost; of those only the latest are kept, up to
`KEPT_FETCHED` and `MAX_FETCHED_BYTES`. Those that were never fetched are kept up to `KEPT_UNFETCHED` and
`MAX_UNFETCHED_BYTES`; asking for a forgotten one says so.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from lilo_engine.errors import Gone, InvalidRequest, LiloError, NotFound, Saturated
from lilo_engine.operations.fingerprint import Fingerprint, coalescing_key
from lilo_engine.operations.operation import (
    ForwardBackward,
    ModelId,
    Operation,
    RequestId,
)
from lilo_engine.operations.result import Complete, Failed, FutureState, Passed, Result
from lilo_engine.operations.sequence import Sequence

KEPT_FETCHED = 1024
"""Covers every reply that can still be on its way to one client."""
MAX_FETCHED_BYTES = 64 * 2**20
"""Of one model's fetched results: those of 250k tokens have a megabyte each. The newest stays whatever its size, because
its client may not have received it."""
MAX_UNFINISHED_BYTES = 2**30
"""Payload of one model's unfinished operations; one that is larger alone is still taken when nothing else waits."""
KEPT_UNFETCHED = 16384
"""Results of a client that never looks; far above what one client keeps in flight."""
MAX_UNFETCHED_BYTES = 2**30
"""Of the same; the newest stays whatever its size."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One operation from its submission to its end."""

    request_id: RequestId
    seq_id: int
    """0 for the creation."""
    fingerprint: Fingerprint
    operation: Operation | None
    """None once it has finished: its payload is let go."""
    refusal: LiloError | None = None
    """Set when the operation was invalid: it fails when its turn comes."""
    tokens: int = 0
    """Sum of the model-input lengths, counted once."""
    payload_bytes: int = 0
    """Size of its arrays, counted once."""
    key: bytes | None = None
    """Equal for passes that may share a command; None for everything else."""
    state: FutureState | None = None
    """None until finished."""
    fetched: bool = False
    trace_parent: str | None = None
    """The client's own trace, if it has one."""


def request_id_of(model_id: ModelId, seq_id: int) -> RequestId:
    """The id of the future of a model's number."""
    return RequestId(f"{model_id}:{seq_id}")


def describe(operation: Operation) -> tuple[int, bytes | None]:
    """Token count and coalescing key, computed once so that a scheduling pass never looks at payloads."""
    if not isinstance(operation, ForwardBackward):
        return 0, None
    key = coalescing_key(operation.loss, operation.loss_config, forward_only=operation.forward_only)
    return operation.num_tokens, key


def payload_bytes(operation: Operation) -> int:
    """Size of the arrays in an operation."""
    if not isinstance(operation, ForwardBackward):
        return 0
    return operation.num_bytes


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The operations of one model."""

    model_id: ModelId
    max_queued: int
    """Waiting operations before submissions are refused."""
    sequence: Sequence[Entry] = field(default_factory=Sequence[Entry])
    _entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    _unfinished_bytes: int = 0
    _fetched: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    """Number -> size of the result in bytes; the latest last."""
    _fetched_bytes: int = 0
    _unfetched: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    """Number -> size, as above."""
    unfetched_bytes: int = 0
    """Of the results that nobody has seen yet."""

    @property
    def unfinished_bytes(self) -> int:
        """Payload of the operations that wait or run."""
        return self._unfinished_bytes

    def request_id(self, seq_id: int) -> RequestId:
        """The id of the future of a number."""
        return request_id_of(self.model_id, seq_id)

    def known(self, seq_id: int, fingerprint: Fingerprint) -> RequestId | None:
        """The id given to the same submission before, or None for a new one.

        Raises:
            InvalidRequest: the number belongs to another payload, or to one that was forgotten.
        """
        entry = self._entries.get(seq_id)
        if entry is None:
            if seq_id < self.sequence.next and seq_id > 0:
                raise InvalidRequest(
                    f"seq_id {seq_id} of {self.model_id} was used long ago; "
                    f"the next new number is {self.sequence.next}"
                )
            return None
        if entry.fingerprint != fingerprint:
            raise InvalidRequest(
                f"seq_id {seq_id} of {self.model_id} was used with another payload; "
                "each request needs a number of its own"
            )
        return entry.request_id

    def open_creation(self, fingerprint: Fingerprint) -> Entry:
        """The future of the model's own creation, outside the numbering."""
        entry = Entry(
            request_id=self.request_id(0), seq_id=0, fingerprint=fingerprint, operation=None
        )
        self._entries[0] = entry
        return entry

    def submit(
        self, operation: Operation, fingerprint: Fingerprint, refusal: LiloError | None
    ) -> Entry:
        """Park a new operation until its number is next.

        Raises:
            Saturated: too many operations or bytes wait already.
        """
        size = 0 if refusal is not None else payload_bytes(operation)
        # The number that all others wait for is always let in: refusing it would hold the model for ever.
        if operation.seq_id != self.sequence.next:
            self._check_room(size)
        tokens, key = (0, None) if refusal is not None else describe(operation)
        entry = Entry(
            request_id=self.request_id(operation.seq_id),
            seq_id=operation.seq_id,
            fingerprint=fingerprint,
            operation=operation,
            refusal=refusal,
            tokens=tokens,
            payload_bytes=size,
            key=key,
        )
        self._unfinished_bytes += size
        self.sequence.park(operation.seq_id, entry)
        self._entries[operation.seq_id] = entry
        return entry

    def _check_room(self, size: int) -> None:
        if len(self.sequence) >= self.max_queued:
            gap = self.sequence.missing()
            why = "" if gap is None else f"; they wait for number {gap}, which has not come"
            raise Saturated(
                f"{len(self.sequence)} operations of {self.model_id} wait already, the limit is "
                f"{self.max_queued}{why}; await results before sending more"
            )
        if self._unfinished_bytes and self._unfinished_bytes + size > MAX_UNFINISHED_BYTES:
            raise Saturated(
                f"the unfinished operations of {self.model_id} hold {self._unfinished_bytes} bytes, "
                f"{size} more would exceed {MAX_UNFINISHED_BYTES}; await results before sending more"
            )

    def find(self, seq_id: int) -> Entry:
        """The entry of a number.

        Raises:
            NotFound: nothing has that number.
            Gone: its result was forgotten.
        """
        entry = self._entries.get(seq_id)
        if entry is not None:
            return entry
        if 0 < seq_id < self.sequence.next:
            raise Gone(
                f"the result of operation {seq_id} of {self.model_id} made room for later ones and is gone; "
                f"the latest {KEPT_FETCHED} fetched results are kept, and what was not fetched for a while"
            )
        raise NotFound(f"{self.model_id} has no operation {seq_id}")

    def complete(self, entry: Entry, result: Result) -> None:
        """An operation finished with a result."""
        self._finish(entry, Complete(result=result))

    def fail(self, entry: Entry, error: LiloError) -> None:
        """An operation finished with an error."""
        self._finish(entry, Failed(error=error))

    def fetch(self, entry: Entry, announce_above: int | None = None) -> None:
        """A finished entry was given to the client, or only announced because it has more than so many bytes."""
        if entry.fetched or entry.state is None:
            return
        size = _result_bytes(entry.state)
        if announce_above is not None and size > announce_above:
            return
        entry.fetched = True
        self.unfetched_bytes -= self._unfetched.pop(entry.seq_id, 0)
        self._fetched[entry.seq_id] = size
        self._fetched_bytes += size
        self._trim_fetched(KEPT_FETCHED)

    def unfinished(self) -> list[Entry]:
        """Everything without a result, in order of the numbers."""
        return [self._entries[n] for n in sorted(self._entries) if self._entries[n].state is None]

    def abandon(self, error: LiloError) -> list[Entry]:
        """Fail what is still parked, and return it."""
        parked = self.sequence.clear()
        for entry in parked:
            self.fail(entry, error)
        return parked

    def forget_fetched(self) -> None:
        """The model ended: only what nobody has seen yet is kept."""
        self._trim_fetched(0)

    def forget_results(self) -> None:
        """There is no room for what nobody has seen; errors, which hold no arrays, are kept."""
        for seq_id, size in list(self._unfetched.items()):
            if size:
                del self._unfetched[seq_id]
                self._forget(seq_id)
        self.unfetched_bytes = 0

    def _finish(self, entry: Entry, state: FutureState) -> None:
        if entry.state is not None:
            return
        entry.state = state
        entry.operation = None
        self._unfinished_bytes -= entry.payload_bytes
        self._unfetched[entry.seq_id] = size = _result_bytes(state)
        self.unfetched_bytes += size
        self._trim_unfetched(KEPT_UNFETCHED)

    def _trim_unfetched(self, limit: int) -> None:
        while len(self._unfetched) > limit or (
            self.unfetched_bytes > MAX_UNFETCHED_BYTES and len(self._unfetched) > 1
        ):
            seq_id, size = self._unfetched.popitem(last=False)
            self.unfetched_bytes -= size
            self._forget(seq_id)

    def _trim_fetched(self, limit: int) -> None:
        while len(self._fetched) > limit or (
            self._fetched_bytes > MAX_FETCHED_BYTES and len(self._fetched) > 1
        ):
            seq_id, size = self._fetched.popitem(last=False)
            self._fetched_bytes -= size
            self._forget(seq_id)

    def _forget(self, seq_id: int) -> None:
        # The creation is never forgotten: its retry must find the model that is there.
        if seq_id > 0:
            self._entries.pop(seq_id, None)


def _result_bytes(state: FutureState) -> int:
    """Size of the arrays in a result; everything else is small."""
    if not isinstance(state, Complete) or not isinstance(state.result, Passed):
        return 0
    return state.result.size_bytes
