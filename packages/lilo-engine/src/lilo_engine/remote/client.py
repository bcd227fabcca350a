"""RemoteEngine, RemoteSampling, RemoteView: what a front has of an engine in another process, over one `Line`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from lilo_engine.engine_client import EngineState
from lilo_engine.errors import BackendLost
from lilo_engine.operations.operation import CreateModel, ModelId, Operation, RequestId
from lilo_engine.operations.result import Failed, FutureState, Pending
from lilo_engine.remote.calls import Hello
from lilo_engine.remote.line import EngineAway, Line
from lilo_engine.sampling.completions import Whose
from lilo_engine.sampling.engine import SampleRequest, SamplerInfo
from lilo_engine.sampling.replies import Completions, SampleState, SampleTicket, SamplingState
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.room import Claim

GIVE_UP_S = 60.0
"""A future whose engine is away for so long has failed: it is gone with that engine, whether or not another one comes."""
_STATE_S = 2.0
"""How long who asks for a state waits for an engine that is away."""


class RemoteEngine:
    """Implements `EngineClient` over a line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def hello(self, patience_s: float) -> Hello:
        """What the engine serves, waiting so long for one.

        Raises:
            EngineAway: none answers.
        """
        return cast("Hello", await self._line.call("hello", patience_s=patience_s))

    async def submit(self, operation: Operation, trace_parent: str | None = None) -> RequestId:
        """See `EngineClient`."""
        return cast("RequestId", await self._line.call("submit", operation, trace_parent))

    async def retrieve(
        self, request_id: RequestId, wait_s: float, announce_above: int | None = None
    ) -> FutureState:
        """See `EngineClient`; pending while the engine is away, up to `GIVE_UP_S`."""
        try:
            state = await self._line.call(
                "retrieve",
                *(request_id, wait_s, announce_above),
                wait_s=wait_s,
                patience_s=wait_s,
            )
        except EngineAway as error:
            return _while_away(self._line, error)
        return cast("FutureState", state)

    async def create_model(self, request: CreateModel) -> RequestId:
        """See `EngineClient`."""
        return cast("RequestId", await self._line.call("create_model", request))

    async def unload(self, model_id: ModelId, reason: str) -> None:
        """See `EngineClient`."""
        await self._line.call("unload", model_id, reason)

    async def state(self) -> EngineState:
        """See `EngineClient`.

        Raises:
            EngineAway: none answers.
        """
        return cast("EngineState", await self._line.call("state", patience_s=_STATE_S))

    async def drain(self) -> None:
        """See `EngineClient`."""
        await self._line.call("drain", wait_s=GIVE_UP_S)


class RemoteSampling:
    """Implements `SamplingClient` over a line."""

    def __init__(self, line: Line, startup_timeout_s: float) -> None:
        """Ask through a line.

        Args:
            line: to the engine's process.
            startup_timeout_s: how long the other side waits for a sampling engine that starts.
        """
        self._line = line
        self._startup_timeout_s = startup_timeout_s
        self._info: tuple[int | None, SamplerInfo] | None = None

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
        ticket = await self._line.call(
            "sampling.submit", session_id, seq_id, fingerprint, adapter, request, claim
        )
        return cast("SampleTicket", ticket)

    async def retrieve(
        self, request_id: str, wait_s: float, announce_above: int | None = None
    ) -> SampleState:
        """See `SamplingClient`; pending while the engine is away, up to `GIVE_UP_S`."""
        try:
            state = await self._line.call(
                "sampling.retrieve",
                *(request_id, wait_s, announce_above),
                wait_s=wait_s,
                patience_s=wait_s,
            )
        except EngineAway as error:
            return _while_away(self._line, error)
        return cast("SampleState", state)

    async def cancel(self, request_id: str) -> None:
        """See `SamplingClient`."""
        await self._line.call("sampling.cancel", request_id)

    async def completions(self, whose: Whose, cursor: int, wait_s: float) -> Completions:
        """See `SamplingClient`; none while the engine is away."""
        try:
            found = await self._line.call(
                "sampling.completions",
                *(tuple(whose), cursor, wait_s),
                wait_s=wait_s,
                patience_s=wait_s,
            )
        except EngineAway:
            return Completions(ended=(), cursor=cursor)
        return cast("Completions", found)

    async def retrieved(self, whose: Whose, request_ids: Sequence[str]) -> None:
        """See `SamplingClient`."""
        if request_ids:
            await self._line.call("sampling.retrieved", tuple(whose), tuple(request_ids))

    async def join(self, session_id: str) -> int:
        """See `SamplingClient`."""
        return cast("int", await self._line.call("sampling.join", session_id))

    async def forget(self, session_id: str) -> None:
        """See `SamplingClient`."""
        await self._line.call("sampling.forget", session_id)

    async def info(self) -> SamplerInfo:
        """See `SamplingClient`; asked once of each engine, since every sample needs it."""
        if self._info is None or self._info[0] != self._line.epoch:
            found = await self._line.call("sampling.info", wait_s=self._startup_timeout_s)
            self._info = (self._line.epoch, cast("SamplerInfo", found))
        return self._info[1]

    async def state(self) -> SamplingState:
        """See `SamplingClient`.

        Raises:
            EngineAway: none answers.
        """
        found = await self._line.call("sampling.state", patience_s=_STATE_S)
        return cast("SamplingState", found)


class RemoteView:
    """Implements `EngineView` over a line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def overview(self) -> dict[str, Any]:
        """See `EngineView`."""
        return cast("dict[str, Any]", await self._line.call("view.overview"))

    async def timeline(self) -> dict[str, Any]:
        """See `EngineView`."""
        return cast("dict[str, Any]", await self._line.call("view.timeline"))

    async def report(self, run_id: str) -> dict[str, Any]:
        """See `EngineView`."""
        return cast("dict[str, Any]", await self._line.call("view.report", run_id))

    async def metrics(self) -> str:
        """See `EngineView`; empty while the engine is away."""
        try:
            return cast("str", await self._line.call("view.metrics", patience_s=_STATE_S))
        except EngineAway:
            return ""


def _while_away(line: Line, error: EngineAway) -> Pending | Failed:
    """What is said of a future whose engine does not answer."""
    if line.away_s < GIVE_UP_S:
        return Pending(queue_state="paused_capacity", reason=error.message)
    return Failed(
        error=BackendLost(
            f"{error.message}; what was asked of that engine is gone with it: restore from the last checkpoint"
        )
    )
