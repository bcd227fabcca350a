"""Supervisor: keeps one sampling engine running, and says which one.

    launching -> serving -> lost -> pause -> launching -> ...
                                         -> given up

An engine is lost when its launcher says so, when it does not answer, or when it has work and makes no progress. It
knows no requests: `manager.py` asks `engine_is_there` for each, and what runs in a lost engine fails there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from lilo_definitions import Definition

from lilo_engine.errors import BackendLost, LiloError, ServerError, Unavailable
from lilo_engine.sampling.engine import SamplerHealth, SamplerInfo, SamplingEngine
from lilo_engine.sampling.launcher import RunningSampler, SamplerLauncher
from lilo_engine.sampling.residents import Residents, See

BACKOFF_S = (0.0, 0.5, 2.0, 5.0, 15.0, 30.0)
"""Pause before a launch, by the failures in a row before it; after one more failure it is given up."""
_STEADY_S = 30.0
"""An engine that served this long, or answered a request, was well: its loss is the first failure of a new row."""
_HEALTH_EVERY_S = 5.0
_HEALTH_WITHIN_S = 20.0
"""For an answer, which takes milliseconds whatever the engine computes."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Serving:
    """One engine that takes calls."""

    engine: SamplingEngine
    info: SamplerInfo
    residents: Residents
    answered: bool = False
    """Whether a request was; an engine that did is worth another one."""


class Supervisor:
    """Launches engines one after the other."""

    def __init__(
        self,
        *,
        definition: Definition,
        launcher: SamplerLauncher,
        health_every_s: float = _HEALTH_EVERY_S,
        health_within_s: float = _HEALTH_WITHIN_S,
        backoff_s: Sequence[float] = BACKOFF_S,
        see: See | None = None,
    ) -> None:
        """Start nothing; `run` does.

        Args:
            definition: its start-up and command limits are kept.
            launcher: how an engine is started.
            health_every_s: pause between two looks at a running engine.
            health_within_s: for an answer to such a look, and to the first question of all.
            backoff_s: pause before a launch, by the failures in a row before it; as many launches are tried.
            see: see `Residents`.
        """
        self.launches = 0
        self.last_failure: str | None = None
        self.given_up = False
        self._definition = definition
        self._launcher = launcher
        self._see = see
        self._health_every_s = health_every_s
        self._health_within_s = health_within_s
        self._backoff_s = tuple(backoff_s)
        self._serving: Serving | None = None
        self._was_well = False
        """Whether the engine that was lost last had been of use: a start that takes long to fail is none."""
        self._changed = anyio.Event()

    @property
    def serving(self) -> Serving | None:
        """The engine that takes calls now, if there is one."""
        return self._serving

    async def run(self) -> None:
        """Launch, serve, and launch again; returns only when it was given up, with the cause in `last_failure`."""
        failures = 0
        while failures < len(self._backoff_s):
            await anyio.sleep(self._backoff_s[failures])
            self._was_well = False
            self.launches += 1
            try:
                async with self._launcher.launch() as running:
                    cause = await self._serve(running)
            except (LiloError, OSError) as error:
                cause = str(error)
            self.last_failure = cause
            _log.error("sampling engine lost: %s", cause)
            failures = 1 if self._was_well else failures + 1
        self.given_up = True
        self._offer(None)
        _log.error("the sampling engine is given up after %d failures in a row", failures)

    def refuse_given_up(self) -> None:
        """Say so when there will be no engine any more.

        Raises:
            BackendLost: the engine was given up; the message has the cause.
        """
        if self.given_up:
            raise BackendLost(
                f"sampling is given up after {len(self._backoff_s)} failures in a row; the last: {self.last_failure}; "
                "mend the cause and start the server again"
            )

    async def engine_is_there(self) -> Serving:
        """The engine that takes calls; waits for one that is starting.

        Raises:
            Unavailable: none is there within the start-up limit.
            BackendLost: it was given up.
        """
        limit_s = self._definition.limits.startup_timeout_s
        with anyio.move_on_after(limit_s):
            while self._serving is None:
                self.refuse_given_up()
                await self._changed.wait()
            return self._serving
        raise Unavailable(
            f"no sampling engine was ready within startup_timeout_s = {limit_s:g} s; "
            f"last failure: {self.last_failure or 'none'}"
        )

    async def _serve(self, running: RunningSampler) -> str:
        """Offer this engine until it is lost; returns the cause."""
        causes: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def until_lost() -> None:
                causes.append(await running.wait_lost())
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_lost)
            try:
                serving = await self._meet(running.engine)
                self._offer(serving)
                since_s = anyio.current_time()
                try:
                    causes.append(await self._watch(running.engine))
                finally:
                    lived_s = anyio.current_time() - since_s
                    self._was_well = serving.answered or lived_s > _STEADY_S
            except ServerError as error:
                causes.append(str(error))
            finally:
                self._offer(None)
            tasks.cancel_scope.cancel()
        return causes[0]

    async def _meet(self, engine: SamplingEngine) -> Serving:
        with anyio.move_on_after(self._health_within_s):
            info = await engine.info()
            return self._serving_of(engine, info)
        raise ServerError(self._no_answer())

    def _serving_of(self, engine: SamplingEngine, info: SamplerInfo) -> Serving:
        residents = Residents(
            engine,
            max_adapters=min(info.max_adapters, self._definition.sampler.max_adapters),
            load_timeout_s=self._definition.limits.command_timeout_s,
            see=self._see,
        )
        _log.info("sampling %s on %s, pid %d", info.base_model, info.device, info.pid)
        return Serving(engine=engine, info=info, residents=residents)

    async def _watch(self, engine: SamplingEngine) -> str:
        """Return when the engine has work and makes no progress, or does not answer."""
        limit_s = self._definition.limits.command_timeout_s
        while True:
            await anyio.sleep(self._health_every_s)
            health: SamplerHealth | None = None
            with anyio.move_on_after(self._health_within_s):
                health = await engine.health()
            if health is None:
                return self._no_answer()
            if health.age_s > limit_s:
                return (
                    f"the sampling engine made no progress for {health.age_s:.0f} s, "
                    f"over command_timeout_s = {limit_s:g} s"
                )

    def _no_answer(self) -> str:
        return f"the sampling engine did not answer within its limit of {self._health_within_s:g} s"

    def _offer(self, serving: Serving | None) -> None:
        self._serving = serving
        self._changed.set()
        self._changed = anyio.Event()
