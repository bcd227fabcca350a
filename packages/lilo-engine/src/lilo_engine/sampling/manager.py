"""SamplingManager: between a front and one sampling engine.

    submit -> future -> [engine is there] -> [adapter is loaded] -> engine.sample -> outcome -> retrieve

Each accepted request is a task that waits on events only. When the engine is lost, the requests in it fail at once with
the cause, and later ones wait for the next engine (`supervisor.py` launches it). Nothing is generated here and no
checkpoint is read; which folder an adapter is, the front says.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

import anyio
import anyio.abc
from lilo_definitions import Definition

from lilo_engine.console.usage_meter import Used
from lilo_engine.errors import Gone, LiloError, ServerError, Unavailable
from lilo_engine.operations.result import Failed, Pending
from lilo_engine.sampling.completions import Whose
from lilo_engine.sampling.engine import SampleRequest, SamplerHealth, SamplerInfo
from lilo_engine.sampling.futures import Outcome, Sampled, SampleFuture, SampleFutures
from lilo_engine.sampling.launcher import SamplerLauncher
from lilo_engine.sampling.replies import Completions, SampleState, SampleTicket, SamplingState
from lilo_engine.sampling.residents import AdapterVersion, See
from lilo_engine.sampling.room import MAX_WAITING, Claim, WaitingRoom, size_of
from lilo_engine.sampling.supervisor import BACKOFF_S, Supervisor
from lilo_engine.sampling.validate import check_request

_MAX_FINISHED = 4096
_MAX_AGE_S = 3600.0
"""Answers kept; the SDK fetches an answer within seconds of its being there."""

_log = logging.getLogger(__name__)


class SamplingManager:
    """One sampling engine, its adapters and its requests."""

    def __init__(
        self,
        *,
        definition: Definition,
        launcher: SamplerLauncher,
        see: See | None = None,
        max_waiting: int = MAX_WAITING,
        max_finished: int = _MAX_FINISHED,
        backoff_s: Sequence[float] = BACKOFF_S,
    ) -> None:
        """Start nothing; `run` does.

        Args:
            definition: what is served; limits and the number of adapters come from it.
            launcher: how an engine is started.
            see: brings the folder of an adapter to where the engine can read it, if it is not there.
            max_waiting: requests that may wait or run, see `room.py`.
            max_finished: answers that are kept.
            backoff_s: pauses before launches, see `Supervisor`.
        """
        self._definition = definition
        self._room = WaitingRoom(max_waiting)
        self._futures = SampleFutures(max_finished=max_finished, max_age_s=_MAX_AGE_S)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._supervisor = Supervisor(
            definition=definition, launcher=launcher, backoff_s=backoff_s, see=see
        )
        self._in_use: Counter[str] = Counter()
        self._joined: Counter[str] = Counter()
        self._used: dict[str, Used] = {}

    @property
    def adapters_in_use(self) -> frozenset[str]:
        """Names of the adapters that unfinished requests need: their folders must not go yet."""
        return frozenset(self._in_use)

    async def run(self) -> None:
        """Keep an engine running and answer requests, until cancelled or until the engine is given up."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await self._supervisor.run()
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
        claim: Claim,
    ) -> SampleTicket:
        """Accept a request; the same number and fingerprint again gives the same ticket and runs nothing.

        Args:
            session_id: the sampling session; numbers are its own.
            seq_id: from 0, in no order.
            fingerprint: of the canonical payload.
            adapter: None = the base model.
            request: its `request_id` and `adapter` are set here.
            claim: whose it is.

        Raises:
            InvalidRequest: the number was used with another payload, or the request cannot be honoured.
            Saturated: too many requests wait, or too many of this owner; try again later.
            Unavailable: the manager is not running.
            BackendLost: the engine was given up; the message has the cause.
        """
        future = self._futures.find(session_id, seq_id, fingerprint)
        if future is None:
            self._check_admission(request, claim)
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
                adapter=adapter.name if adapter is not None else None,
            )
            self._room.enter(claim, size_of(request))
            self._tasks.start_soon(self._answer, future, adapter, request, claim)
        return SampleTicket(request_id=future.request_id, sequence_ids=future.sequence_ids)

    async def retrieve(
        self, request_id: str, wait_s: float, announce_above: int | None = None
    ) -> SampleState:
        """The state of a request, waiting up to `wait_s` for it to finish; an answer can be fetched again.

        One of more than `announce_above` bytes is only announced: it is kept as one that nobody has seen.

        Raises:
            NotFound: there is no such request, or its answer was forgotten.
        """
        future = self._futures.get(request_id)
        if future.outcome is None and wait_s > 0:
            with anyio.move_on_after(wait_s):
                await future.finished.wait()
        if future.outcome is None:
            if self._supervisor.serving is not None:
                return Pending()
            return Pending(queue_state="paused_capacity", reason="the sampling engine is starting")
        self._futures.fetched(future, announce_above)
        return future.outcome

    async def cancel(self, request_id: str) -> None:
        """Stop a request; its state becomes a failure. Unknown and finished ones are no error."""
        try:
            future = self._futures.get(request_id)
        except LiloError:
            return
        self._stop(future)

    async def completions(self, whose: Whose, cursor: int, wait_s: float) -> Completions:
        """Requests of a client that ended after `cursor` (0 = all), waiting up to `wait_s` for the first.

        Raises:
            Gone: the cursor is of an earlier server.
        """
        log = self._futures.completions
        found = log.after(whose, cursor)
        if not found.request_ids and wait_s > 0:
            await log.wait(whose, wait_s)
            found = log.after(whose, cursor)
        return Completions(ended=self._futures.outcomes(found.request_ids), cursor=found.cursor)

    def retrieved(self, whose: Whose, request_ids: Sequence[str]) -> None:
        """A client has these answers, so that they may be forgotten."""
        self._futures.retrieved(whose, request_ids)

    def take_used(self) -> dict[str, Used]:
        """What sampling sessions used since this was last asked, by their ids."""
        used, self._used = self._used, {}
        return used

    def join(self, session_id: str) -> int:
        """The number of one more client of a sampling session; the first client is 0 and does not join."""
        self._joined[session_id] += 1
        return self._joined[session_id]

    def forget(self, session_id: str) -> None:
        """Stop and drop everything of a sampling session."""
        self._joined.pop(session_id, None)
        for future in self._futures.forget(session_id):
            self._stop(future)

    async def info(self) -> SamplerInfo:
        """What the engine can do; waits for one that is starting.

        Raises:
            Unavailable: none is there within the start-up limit.
        """
        return (await self._supervisor.engine_is_there()).info

    async def state(self) -> SamplingState:
        """What is going on; answers at once while the engine starts."""
        serving = self._supervisor.serving
        health: SamplerHealth | None = None
        if serving is not None:
            try:
                with anyio.move_on_after(1.0):
                    health = await serving.engine.health()
            except ServerError:
                serving = None
        phase = "starting" if self._supervisor.launches <= 1 else "restarting"
        if self._tasks is None:
            phase = "stopped"
        return SamplingState(
            phase="serving" if serving is not None else phase,
            launches=self._supervisor.launches,
            health=health,
            unfinished_requests=self._futures.num_unfinished,
            loaded_adapters=serving.residents.names if serving is not None else (),
            last_failure=self._supervisor.last_failure,
        )

    # ---- requests

    def _check_admission(self, request: SampleRequest, claim: Claim) -> None:
        check_request(
            request,
            vocab_size=self._definition.model.vocab_size,
            context=self._definition.context,
        )
        self._supervisor.refuse_given_up()
        if self._tasks is None:
            raise Unavailable("sampling is not running; try again when the server is ready")
        self._room.check(claim, size_of(request))

    async def _answer(
        self,
        future: SampleFuture,
        adapter: AdapterVersion | None,
        request: SampleRequest,
        claim: Claim,
    ) -> None:
        """Run one request to its outcome, whatever it is."""
        outcome: Outcome = Failed(error=Unavailable("the server is stopping; try again later"))
        if adapter is not None:
            self._in_use[adapter.name] += 1
        try:
            with future.scope:
                outcome = await self._run(adapter, request)
            if isinstance(outcome, Sampled):
                self._count(future.session_id, request, outcome)
            if future.scope.cancelled_caught:
                outcome = Failed(error=Gone(f"sample request {request.request_id} was cancelled"))
        finally:
            self._futures.settle(future, outcome)
            self._room.leave(claim, size_of(request))
            if adapter is not None:
                self._in_use[adapter.name] -= 1
                self._in_use += Counter()  # drops what fell to zero

    def _count(self, session_id: str, request: SampleRequest, outcome: Sampled) -> None:
        """Token ids are int32."""
        more = Used(
            prompt_tokens=len(request.prompt) // 4,
            sampled_tokens=sum(len(each.tokens) for each in outcome.result.sequences) // 4,
        )
        self._used[session_id] = self._used.get(session_id, Used()) + more

    async def _run(self, adapter: AdapterVersion | None, request: SampleRequest) -> Outcome:
        try:
            serving = await self._supervisor.engine_is_there()
            if adapter is None:
                result = await serving.engine.sample(request)
            else:
                async with serving.residents.hold(adapter):
                    result = await serving.engine.sample(request)
            serving.answered = True
            return Sampled(result=result)
        except LiloError as error:
            return Failed(error=error)
        except Exception as error:  # a future must always end
            _log.exception("sample request %s failed", request.request_id)
            return Failed(error=ServerError(f"sampling failed: {type(error).__name__}: {error}"))

    def _stop(self, future: SampleFuture) -> None:
        if future.outcome is None:
            future.scope.cancel()
