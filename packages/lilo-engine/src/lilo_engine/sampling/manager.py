"""SamplingManager: between a front and one sampling engine.

    submit -> future -> [engine is there] -> [adapter is loaded] -> engine.sample -> outcome -> retrieve

Each accepted request is a task that waits on events only. The manager keeps one engine running: when it is lost, the
requests in it fail at once with the cause, later ones wait for the next engine. It generates nothing and reads no
checkpoints; which folder an adapter is, the front says.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio
import anyio.abc
from lilo_definitions import Definition

from lilo_engine.errors import Gone, LiloError, Saturated, ServerError, Unavailable
from lilo_engine.operations.result import Failed, Pending
from lilo_engine.sampling.engine import (
    SampleRequest,
    SamplerHealth,
    SamplerInfo,
    SamplingEngine,
)
from lilo_engine.sampling.futures import Outcome, Sampled, SampleFuture, SampleFutures
from lilo_engine.sampling.launcher import RunningSampler, SamplerLauncher
from lilo_engine.sampling.residents import AdapterVersion, Residents
from lilo_engine.sampling.validate import check_request

SampleState: TypeAlias = Pending | Sampled | Failed

_MAX_WAITING = 4096
"""Requests that wait or run; the SDK sends up to 400 at once per client."""
_MAX_FINISHED = 4096
_MAX_AGE_S = 3600.0
"""Answers kept; the SDK fetches an answer within seconds of its being there."""
_BACKOFF_S = (0.0, 0.5, 2.0, 5.0, 15.0, 30.0)
"""Pause before a launch, by the failures in a row before it."""
_STEADY_S = 30.0
"""An engine that ran this long counts as well, and the next pause is none."""
_HEALTH_EVERY_S = 5.0
_HEALTH_WITHIN_S = 20.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTicket:
    """What a front answers to a submission."""

    request_id: str
    sequence_ids: tuple[str, ...]
    """Exactly `num_samples` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingState:
    """What the sampling side is doing, by progress."""

    phase: Literal["starting", "serving", "restarting", "stopped"]
    launches: int
    health: SamplerHealth | None
    unfinished_requests: int
    loaded_adapters: tuple[str, ...]
    last_failure: str | None


@dataclass(slots=True, eq=False)
class _Serving:
    """One engine that takes calls."""

    engine: SamplingEngine
    info: SamplerInfo
    residents: Residents


class SamplingManager:
    """One sampling engine, its adapters and its requests."""

    def __init__(
        self,
        *,
        definition: Definition,
        launcher: SamplerLauncher,
        max_waiting: int = _MAX_WAITING,
        max_finished: int = _MAX_FINISHED,
    ) -> None:
        """Start nothing; `run` does.

        Args:
            definition: what is served; limits and the number of adapters come from it.
            launcher: how an engine is started.
            max_waiting: requests that may wait or run before submissions are refused.
            max_finished: answers that are kept.
        """
        self._definition = definition
        self._launcher = launcher
        self._max_waiting = max_waiting
        self._futures = SampleFutures(max_finished=max_finished, max_age_s=_MAX_AGE_S)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._serving: _Serving | None = None
        self._changed = anyio.Event()
        self._launches = 0
        self._last_failure: str | None = None
        self._in_use: Counter[str] = Counter()

    @property
    def adapters_in_use(self) -> frozenset[str]:
        """Names of the adapters that unfinished requests need: their folders must not go yet."""
        return frozenset(self._in_use)

    async def run(self) -> None:
        """Keep an engine running and answer requests until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await self._supervise()
        finally:
            self._tasks = None

    def submit(
        self,
        *,
        session_id: str,
        seq_id: int,
        fingerprint: str,
        adapter: AdapterVersion | None,
        request: SampleRequest,
    ) -> SampleTicket:
        """Accept a request; the same number and fingerprint again gives the same ticket and runs nothing.

        Args:
            session_id: the sampling session; numbers are its own.
            seq_id: from 0, in no order.
            fingerprint: of the canonical payload.
            adapter: None = the base model.
            request: its `request_id` and `adapter` are set here.

        Raises:
            InvalidRequest: the number was used with another payload, or the request cannot be honoured.
            Saturated: too many requests wait; try again later.
            Unavailable: the manager is not running.
        """
        future = self._futures.find(session_id, seq_id, fingerprint)
        if future is None:
            self._check_admission(request)
            assert self._tasks is not None
            future = self._futures.open(
                session_id=session_id,
                seq_id=seq_id,
                fingerprint=fingerprint,
                num_samples=request.num_samples,
            )
            request = dataclasses.replace(
                request,
                request_id=future.request_id,
                adapter=adapter.key if adapter is not None else None,
            )
            self._tasks.start_soon(self._answer, future, adapter, request)
        return SampleTicket(request_id=future.request_id, sequence_ids=future.sequence_ids)

    async def retrieve(self, request_id: str, wait_s: float) -> SampleState:
        """The state of a request, waiting up to `wait_s` for it to finish; an answer can be fetched again.

        Raises:
            NotFound: there is no such request, or its answer was forgotten.
        """
        future = self._futures.get(request_id)
        if future.outcome is None and wait_s > 0:
            with anyio.move_on_after(wait_s):
                await future.finished.wait()
        if future.outcome is None:
            if self._serving is not None:
                return Pending()
            return Pending(queue_state="paused_capacity", reason="the sampling engine is starting")
        self._futures.fetched(future)
        return future.outcome

    async def cancel(self, request_id: str) -> None:
        """Stop a request; its state becomes a failure. Unknown and finished ones are no error."""
        try:
            future = self._futures.get(request_id)
        except LiloError:
            return
        self._stop(future)

    def forget(self, session_id: str) -> None:
        """Stop and drop everything of a sampling session."""
        for future in self._futures.forget(session_id):
            self._stop(future)

    async def info(self) -> SamplerInfo:
        """What the engine can do; waits for one that is starting.

        Raises:
            Unavailable: none is there within the start-up limit.
        """
        return (await self._engine_is_there()).info

    async def state(self) -> SamplingState:
        """What is going on; answers at once while the engine starts."""
        serving = self._serving
        health: SamplerHealth | None = None
        if serving is not None:
            try:
                with anyio.move_on_after(1.0):
                    health = await serving.engine.health()
            except ServerError:
                serving = None
        phase = "starting" if self._launches <= 1 else "restarting"
        if self._tasks is None:
            phase = "stopped"
        return SamplingState(
            phase="serving" if serving is not None else phase,
            launches=self._launches,
            health=health,
            unfinished_requests=self._futures.num_unfinished,
            loaded_adapters=serving.residents.names if serving is not None else (),
            last_failure=self._last_failure,
        )

    # ---- requests

    def _check_admission(self, request: SampleRequest) -> None:
        check_request(
            request,
            vocab_size=self._definition.model.vocab_size,
            context=self._definition.context,
        )
        if self._tasks is None:
            raise Unavailable("sampling is not running; try again when the server is ready")
        if self._futures.num_unfinished >= self._max_waiting:
            raise Saturated(
                f"{self._max_waiting} sample requests wait, which is the limit; try again later"
            )

    async def _answer(
        self, future: SampleFuture, adapter: AdapterVersion | None, request: SampleRequest
    ) -> None:
        """Run one request to its outcome, whatever it is."""
        outcome: Outcome = Failed(error=Unavailable("the server is stopping; try again later"))
        if adapter is not None:
            self._in_use[adapter.name] += 1
        try:
            with future.scope:
                outcome = await self._run(adapter, request)
            if future.scope.cancelled_caught:
                outcome = Failed(error=Gone(f"sample request {request.request_id} was cancelled"))
        finally:
            self._futures.settle(future, outcome)
            if adapter is not None:
                self._in_use[adapter.name] -= 1
                self._in_use += Counter()  # drops what fell to zero

    async def _run(self, adapter: AdapterVersion | None, request: SampleRequest) -> Outcome:
        try:
            serving = await self._engine_is_there()
            if adapter is None:
                return Sampled(result=await serving.engine.sample(request))
            async with serving.residents.hold(adapter):
                return Sampled(result=await serving.engine.sample(request))
        except LiloError as error:
            return Failed(error=error)
        except Exception as error:  # a future must always end
            _log.exception("sample request %s failed", request.request_id)
            return Failed(error=ServerError(f"sampling failed: {type(error).__name__}: {error}"))

    async def _engine_is_there(self) -> _Serving:
        limit_s = self._definition.limits.startup_timeout_s
        with anyio.move_on_after(limit_s):
            while self._serving is None:
                await self._changed.wait()
            return self._serving
        raise Unavailable(
            f"no sampling engine was ready within startup_timeout_s = {limit_s:g} s; "
            f"last failure: {self._last_failure or 'none'}"
        )

    def _stop(self, future: SampleFuture) -> None:
        if future.outcome is None:
            future.scope.cancel()

    # ---- the engine

    async def _supervise(self) -> None:
        """Launch, serve, and launch again."""
        failures = 0
        while True:
            await anyio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            began = time.monotonic()
            self._launches += 1
            try:
                async with self._launcher.launch() as running:
                    cause = await self._serve(running)
            except LiloError as error:
                cause = str(error)
            self._last_failure = cause
            _log.error("sampling engine lost: %s", cause)
            failures = 1 if time.monotonic() - began > _STEADY_S else failures + 1

    async def _serve(self, running: RunningSampler) -> str:
        """Have requests go to this engine until it is lost; returns the cause."""
        causes: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def until_lost() -> None:
                causes.append(await running.wait_lost())
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_lost)
            try:
                self._serve_from(await self._meet(running.engine))
                causes.append(await self._watch(running.engine))
            except ServerError as error:
                causes.append(str(error))
            finally:
                self._serve_from(None)
            tasks.cancel_scope.cancel()
        return causes[0]

    async def _meet(self, engine: SamplingEngine) -> _Serving:
        info = await engine.info()
        residents = Residents(
            engine,
            max_adapters=min(info.max_adapters, self._definition.sampler.max_adapters),
            load_timeout_s=self._definition.limits.command_timeout_s,
        )
        _log.info("sampling %s on %s, pid %d", info.base_model, info.device, info.pid)
        return _Serving(engine, info, residents)

    async def _watch(self, engine: SamplingEngine) -> str:
        """Return when the engine has work and makes no progress, or does not answer."""
        limit_s = self._definition.limits.command_timeout_s
        while True:
            await anyio.sleep(_HEALTH_EVERY_S)
            health: SamplerHealth | None = None
            with anyio.move_on_after(_HEALTH_WITHIN_S):
                health = await engine.health()
            if health is None:
                return (
                    f"the sampling engine did not answer within its limit of {_HEALTH_WITHIN_S:g} s"
                )
            if health.age_s > limit_s:
                return (
                    f"the sampling engine made no progress for {health.age_s:.0f} s, "
                    f"over command_timeout_s = {limit_s:g} s"
                )

    def _serve_from(self, serving: _Serving | None) -> None:
        self._serving = serving
        self._changed.set()
        self._changed = anyio.Event()
