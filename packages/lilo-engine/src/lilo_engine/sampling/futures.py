"""SampleFutures: every accepted sample request, by (sampling session, number), until its answer may be forgotten.

No I/O and no tasks; `manager.py` runs the requests. Numbers are per sampling session, start anywhere and imply no
order. The same number with the same fingerprint is the same request; with another one it is refused. An answer can be
fetched again: what was fetched is forgotten first, then the oldest, when there are too many, or they are too old or
too large together.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio

from lilo_engine.errors import Gone, InvalidRequest, NotFound
from lilo_engine.operations.result import Failed
from lilo_engine.sampling.completions import CompletionLog, Whose, whose_is
from lilo_engine.sampling.engine import SampleResult

PREFIX = "sample:"
"""Request ids of samples start with it, so that a front can tell them from an engine's."""


MAX_FETCHED_BYTES = 64 * 2**20
"""Of answers that were handed out and are kept for a client that asks again."""
MAX_UNFETCHED_BYTES = 2**30
"""Of answers that nobody has asked for yet: far above what clients keep in flight, and bounded all the same. The newest
stays whatever its size."""
_REMEMBERED = 4096
"""Sampling sessions that ended: who asks for their answers is told so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Finished; `result` can be fetched again."""

    result: SampleResult


Outcome: TypeAlias = Sampled | Failed


@dataclass(slots=True, eq=False, kw_only=True)
class SampleFuture:
    """One accepted request."""

    request_id: str
    session_id: str
    fingerprint: str
    sequence_ids: tuple[str, ...]
    outcome: Outcome | None = None
    finished: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """What the request runs in; cancelling it stops it at the engine."""
    finished_at: float = 0.0


class SampleFutures:
    """All of them, with bounded memory for the finished ones."""

    def __init__(
        self, *, max_finished: int, max_age_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Empty.

        Args:
            max_finished: answers kept.
            max_age_s: an answer may be forgotten this long after it was there.
            now: clock in seconds.
        """
        self._max_finished = max_finished
        self._max_age_s = max_age_s
        self._now = now
        self._by_id: dict[str, SampleFuture] = {}
        self._by_session: dict[str, set[str]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._unfetched_bytes = 0
        # In the order of finishing; together they are the finished ones.
        self._unfetched: OrderedDict[str, SampleFuture] = OrderedDict()
        self._fetched: OrderedDict[str, SampleFuture] = OrderedDict()
        self._fetched_bytes = 0
        self.completions = CompletionLog()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._by_id) - len(self._unfetched) - len(self._fetched)

    def find(self, session_id: str, seq_id: int, fingerprint: str) -> SampleFuture | None:
        """The request that already has this number, if there is one.

        Raises:
            InvalidRequest: it had another payload.
            Gone: the sampling session ended.
        """
        self._refuse_ended(session_id, f"sampling session {session_id!r}")
        future = self._by_id.get(_request_id(session_id, seq_id))
        if future is not None and future.fingerprint != fingerprint:
            raise InvalidRequest(
                f"sample number {seq_id} of session {session_id} was used with another request; "
                "give every request a number of its own"
            )
        return future

    def open(
        self, *, session_id: str, seq_id: int, fingerprint: str, num_samples: int
    ) -> SampleFuture:
        """Make the future of a new request."""
        request_id = _request_id(session_id, seq_id)
        assert request_id not in self._by_id, request_id
        future = SampleFuture(
            request_id=request_id,
            session_id=session_id,
            fingerprint=fingerprint,
            sequence_ids=tuple(f"{request_id}:{sample}" for sample in range(num_samples)),
        )
        self._by_id[request_id] = future
        self._by_session.setdefault(session_id, set()).add(request_id)
        return future

    def get(self, request_id: str) -> SampleFuture:
        """The future of an id.

        Raises:
            NotFound: there is none, or it was forgotten.
            Gone: its sampling session ended.
        """
        future = self._by_id.get(request_id)
        if future is None:
            session_id = request_id.removeprefix(PREFIX).rpartition(":")[0]
            self._refuse_ended(session_id, f"sample request {request_id!r}")
            raise NotFound(
                f"there is no sample request {request_id!r}; the last {self._max_finished} answers are kept "
                f"for {self._max_age_s:g} s, send the request again"
            )
        return future

    def settle(self, future: SampleFuture, outcome: Outcome) -> None:
        """Finish a request; the first outcome stays."""
        if future.outcome is not None:
            return
        future.outcome = outcome
        future.finished_at = self._now()
        future.finished.set()
        # A session may have been forgotten while its request still ran.
        if self._by_id.get(future.request_id) is future:
            self._unfetched[future.request_id] = future
            self.completions.add(future.request_id)
            self._unfetched_bytes += _size_bytes(future)
            self._trim()

    def fetched(self, future: SampleFuture, announce_above: int | None = None) -> None:
        """Note that the answer was handed out, or only announced because it has more than so many bytes."""
        if announce_above is not None and _size_bytes(future) > announce_above:
            return
        if self._unfetched.pop(future.request_id, None) is not None:
            self._unfetched_bytes -= _size_bytes(future)
            self._fetched[future.request_id] = future
            self._fetched_bytes += _size_bytes(future)
            # The newest stays whatever its size: its client may not have received it.
            while self._fetched_bytes > MAX_FETCHED_BYTES and len(self._fetched) > 1:
                self._drop(next(iter(self._fetched.values())))

    def outcomes(self, request_ids: Sequence[str]) -> list[tuple[str, Outcome]]:
        """Those of the finished requests among the ids."""
        futures = [self._by_id[id] for id in request_ids if id in self._by_id]
        return [(f.request_id, f.outcome) for f in futures if f.outcome is not None]

    def retrieved(self, whose: Whose, request_ids: Sequence[str]) -> None:
        """A client has these answers for good; those of others, and unfinished ones, are left alone."""
        for request_id in request_ids:
            future = self._by_id.get(request_id)
            if future is not None and future.outcome is not None and whose_is(request_id) == whose:
                self._drop(future)

    def forget(self, session_id: str) -> list[SampleFuture]:
        """Drop all of a session that ended; returns those that had not finished."""
        self._ended[session_id] = None
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        dropped = [self._by_id[i] for i in self._by_session.get(session_id, ())]
        for future in dropped:
            self._drop(future)
        return [future for future in dropped if future.outcome is None]

    def _refuse_ended(self, session_id: str, what: str) -> None:
        if session_id in self._ended:
            raise Gone(
                f"{what} is gone: the session of its client ended; make a new ServiceClient and "
                "a sampling client on the weights you had, and send the request again"
            )

    def _trim(self) -> None:
        """Forget what is over the bounds. Constant work per finished request."""
        while self._unfetched_bytes > MAX_UNFETCHED_BYTES and len(self._unfetched) > 1:
            self._drop(next(iter(self._unfetched.values())))
        oldest = self._now() - self._max_age_s
        for finished in (self._fetched, self._unfetched):
            while finished:
                future = next(iter(finished.values()))
                too_many = len(self._fetched) + len(self._unfetched) > self._max_finished
                if not too_many and future.finished_at >= oldest:
                    break
                self._drop(future)

    def _drop(self, future: SampleFuture) -> None:
        del self._by_id[future.request_id]
        self.completions.remove(future.request_id)
        if self._unfetched.pop(future.request_id, None) is not None:
            self._unfetched_bytes -= _size_bytes(future)
        if self._fetched.pop(future.request_id, None) is not None:
            self._fetched_bytes -= _size_bytes(future)
        siblings = self._by_session[future.session_id]
        siblings.discard(future.request_id)
        if not siblings:
            del self._by_session[future.session_id]


def _request_id(session_id: str, seq_id: int) -> str:
    return f"{PREFIX}{session_id}:{seq_id}"


def _size_bytes(future: SampleFuture) -> int:
    """Payload of an answer; an error counts as nothing."""
    if not isinstance(future.outcome, Sampled):
        return 0
    return future.outcome.result.size_bytes
