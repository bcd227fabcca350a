"""SamplingClient: the only way a front reaches the sampling side: in-process on a laptop, over HTTP otherwise.

The manager of samples lives with the engine, so that a sample can be fetched through any front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lilo_engine.sampling.completions import Whose
from lilo_engine.sampling.engine import SampleRequest, SamplerInfo
from lilo_engine.sampling.manager import SamplingManager
from lilo_engine.sampling.replies import Completions, SampleState, SampleTicket, SamplingState
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.room import Claim


class SamplingClient(Protocol):
    """One sampling manager, as a front sees it. Every call may be sent again."""

    async def submit(
        self,
        *,
        session_id: str,
        seq_id: int,
        fingerprint: str,
        adapter: AdapterVersion | None,
        request: SampleRequest,
        claim: Claim,
    ) -> SampleTicket:
        """Accept a request; the same number and fingerprint again gives the same ticket and runs nothing.

        Raises:
            InvalidRequest, Gone, Saturated, Unavailable, BackendLost: see `SamplingManager.submit`.
        """
        ...

    async def retrieve(
        self, request_id: str, wait_s: float, announce_above: int | None = None
    ) -> SampleState:
        """The state of a request, waiting up to `wait_s` for it to finish; an answer can be fetched again.

        Args:
            request_id: of the sample.
            wait_s: how long to wait.
            announce_above: an answer of more bytes is only announced to its client, which asks again when it has room:
                until then it is kept as one that nobody has seen. None: it is handed out.

        Raises:
            NotFound, Gone: there is no such request, or its answer was forgotten.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Stop a request; unknown and finished ones are no error."""
        ...

    async def completions(self, whose: Whose, cursor: int, wait_s: float) -> Completions:
        """Requests of a client that ended after `cursor`, waiting up to `wait_s` for the first.

        Raises:
            Gone: the cursor is of an earlier manager.
        """
        ...

    async def retrieved(self, whose: Whose, request_ids: Sequence[str]) -> None:
        """A client has these answers, so that they may be forgotten."""
        ...

    async def join(self, session_id: str) -> int:
        """The number of one more client of a sampling session; numbers may be left out, never given twice."""
        ...

    async def forget(self, session_id: str) -> None:
        """Stop and drop everything of a sampling session."""
        ...

    async def info(self) -> SamplerInfo:
        """What the sampling engine can do; waits for one that is starting.

        Raises:
            Unavailable, BackendLost: none is there within the start-up limit, or it was given up.
        """
        ...

    async def state(self) -> SamplingState:
        """What is going on."""
        ...


class LocalSampling:
    """Implements `SamplingClient` over the manager in this process."""

    def __init__(self, manager: SamplingManager) -> None:
        self._manager = manager

    @property
    def adapters_in_use(self) -> frozenset[str]:
        """Names of the adapters that unfinished requests need."""
        return self._manager.adapters_in_use

    async def submit(
        self,
        *,
        session_id: str,
        seq_id: int,
        fingerprint: str,
        adapter: AdapterVersion | None,
        request: SampleRequest,
        claim: Claim,
    ) -> SampleTicket:
        """See `SamplingClient`."""
        return self._manager.submit(
            session_id=session_id,
            seq_id=seq_id,
            fingerprint=fingerprint,
            adapter=adapter,
            request=request,
            claim=claim,
        )

    async def retrieve(
        self, request_id: str, wait_s: float, announce_above: int | None = None
    ) -> SampleState:
        """See `SamplingClient`."""
        return await self._manager.retrieve(request_id, wait_s, announce_above)

    async def cancel(self, request_id: str) -> None:
        """See `SamplingClient`."""
        await self._manager.cancel(request_id)

    async def completions(self, whose: Whose, cursor: int, wait_s: float) -> Completions:
        """See `SamplingClient`."""
        return await self._manager.completions(whose, cursor, wait_s)

    async def retrieved(self, whose: Whose, request_ids: Sequence[str]) -> None:
        """See `SamplingClient`."""
        self._manager.retrieved(whose, request_ids)

    async def join(self, session_id: str) -> int:
        """See `SamplingClient`."""
        return self._manager.join(session_id)

    async def forget(self, session_id: str) -> None:
        """See `SamplingClient`."""
        self._manager.forget(session_id)

    async def info(self) -> SamplerInfo:
        """See `SamplingClient`."""
        return await self._manager.info()

    async def state(self) -> SamplingState:
        """See `SamplingClient`."""
        return await self._manager.state()
