"""Composition root: the only file that knows every part. Builds HTTP apps; the lifespan of each is one task group.

    launchers -> Engine, SamplingManager                   -> Front -> routes      `build_app`: all in one process
    Records + volume -> Control -> journal (to the engine), sweeper

    launchers -> Engine, SamplingManager -> EngineServer                           `EngineApp`: `lilo engine`
                                                 ^
                                Line -> RemoteEngine, RemoteSampling -> Front      `build_front_app`: `lilo front`

`lilo serve` passes launchers that start processes; tests and benchmarks pass those that stay in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import anyio
from fastapi import FastAPI
from lilo_definitions import Definition, resolve_source
from starlette.applications import Starlette

from lilo_engine.commands.threads import in_thread
from lilo_engine.console import traces
from lilo_engine.console.engine_view import EngineView, LocalView
from lilo_engine.console.metrics import ServerMetrics
from lilo_engine.console.usage_meter import UsageMeter
from lilo_engine.control.engine_address import fronts_secret
from lilo_engine.control.sweeper import Sweeper
from lilo_engine.control.upkeep import Upkeep
from lilo_engine.control.usage import UsageLog, keep_usage
from lilo_engine.engine import Engine
from lilo_engine.parts import FrontParts, Parts
from lilo_engine.remote.calls import Hello
from lilo_engine.remote.client import RemoteEngine, RemoteSampling, RemoteView
from lilo_engine.remote.server import Answering, engine_server
from lilo_engine.requests import (
    checkpoints,
    console,
    error_response,
    future_list,
    futures,
    models,
    openapi,
    rest,
    sampling,
    session_views,
    sessions,
    sharing,
    training,
    unknown,
)
from lilo_engine.requests.answers import AnswerCount
from lilo_engine.requests.auth import ApiKeyLayer
from lilo_engine.requests.front import Front
from lilo_engine.requests.long_polls import LongPolls
from lilo_engine.requests.plain_route import PlainRoutes
from lilo_engine.sampling.manager import SamplingManager
from lilo_engine.sampling.snapshots import Snapshots
from lilo_engine.sampling_client import LocalSampling

PREFIX = "/api/v1"
ROUTES = (
    futures,
    training,
    sampling,
    future_list,
    sessions,
    checkpoints,
    models,
    rest,
    sharing,
    session_views,
    console,
    openapi,
    unknown,
)
"""Matched in this order, so that what is asked most is found first; `unknown` matches everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineSide:
    """What only one process over the records has."""

    parts: Parts
    engine: Engine
    manager: SamplingManager
    sweeper: Sweeper
    meter: UsageMeter

    @classmethod
    def of(cls, parts: Parts) -> _EngineSide:
        control, definition = parts.control, parts.definition
        engine = Engine(
            definition=definition,
            launcher=parts.launcher,
            journal=control.journal,
            segments=parts.own_segments(),
        )
        engine.recorder.watcher = traces.watcher()
        manager = SamplingManager(
            definition=definition,
            launcher=parts.sampler_launcher,
            see=Snapshots(parts.data.checkpoints).see,
        )
        sweep = replace(
            parts.settings.sweep, unnamed_versions=definition.sampler.ephemeral_versions
        )
        sweeper = Sweeper(control, engine, LocalSampling(manager), sweep)
        meter = UsageMeter(
            recorder=engine.recorder,
            samples=manager.take_used,
            owner_of_run=control.owner_of_run,
            owner_of_sampler=control.owner_of_sampler,
            num_devices=definition.topology.world_size,
        )
        return cls(parts=parts, engine=engine, manager=manager, sweeper=sweeper, meter=meter)

    @property
    def view(self) -> LocalView:
        return LocalView(self.engine, self.meter)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        """Run everything while the app runs."""
        control, lease = self.parts.control, self.parts.lease
        async with anyio.create_task_group() as tasks:
            if lease is not None:
                tasks.start_soon(lease.keep)
            tasks.start_soon(self.engine.run)
            tasks.start_soon(self.manager.run)
            tasks.start_soon(self.sweeper.run, control.clock)
            tasks.start_soon(keep_usage, self.meter, UsageLog(control.records), control.clock)
            yield
            # What is being published ends well; what only waits does not start any more.
            with anyio.move_on_after(0 if self._is_deposed else self.parts.settings.drain_s):
                await self.engine.drain()
            tasks.cancel_scope.cancel()
        await in_thread(self.engine.recorder.watcher.close)
        if lease is not None:
            lease.give_back()
        control.records.close()

    @property
    def _is_deposed(self) -> bool:
        return self.parts.lease is not None and self.parts.lease.lost.is_set()


def build_app(parts: Parts) -> FastAPI:
    """Front and engine in one. Its parts run while its lifespan does; `app.state.front` is what routes work with."""
    side, definition = _EngineSide.of(parts), parts.definition
    front = Front(
        definition=definition,
        model_folder=resolve_source(definition.model.source),
        engine=side.engine,
        sampling=LocalSampling(side.manager),
        control=parts.control,
        settings=parts.settings.front,
    )
    return _public_app(front, side.view, side.lifespan)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineApp:
    """The engine alone, for fronts in other processes."""

    parts: Parts
    engine: Engine
    sampling: SamplingManager
    polls: LongPolls
    """Of fronts; end them when the app is to stop."""
    asgi: Starlette

    @classmethod
    def of(cls, parts: Parts) -> EngineApp:
        """Build it; its parts run while the app's lifespan does.

        Raises:
            LiloError: the records cannot be used.
        """
        side, definition = _EngineSide.of(parts), parts.definition
        assert parts.lease is not None, "fronts find an engine by its lease"
        hello = Hello(
            version=version("lilo-engine"),
            definition=definition.model_dump_json(),
            model_folder=str(resolve_source(definition.model.source)),
        )
        answering = Answering(
            hello=hello,
            engine=side.engine,
            sampling=LocalSampling(side.manager),
            view=side.view,
            reign=parts.lease,
            secret=parts.control.records.now(fronts_secret),
        )
        return cls(
            parts=parts,
            engine=side.engine,
            sampling=side.manager,
            polls=answering.polls,
            asgi=engine_server(answering, side.lifespan),
        )


def build_front_app(parts: FrontParts) -> FastAPI:
    """A front alone; `app.state.front` is what routes work with."""
    control = parts.control
    definition = Definition.model_validate_json(parts.hello.definition)
    upkeep = Upkeep(control)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(upkeep.run)
            yield
            tasks.cancel_scope.cancel()
        with anyio.move_on_after(parts.settings.drain_s):
            await upkeep.once()
        control.records.close()

    front = Front(
        definition=definition,
        model_folder=Path(parts.hello.model_folder),
        engine=RemoteEngine(parts.line),
        sampling=RemoteSampling(parts.line, definition.limits.startup_timeout_s),
        control=control,
        settings=parts.settings.front,
    )
    return _public_app(front, RemoteView(parts.line), lifespan)


def _public_app(
    front: Front,
    view: EngineView,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
) -> FastAPI:
    """The app that clients talk to."""
    app = FastAPI(
        title="lilo",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # Operations have spans of our own (`console/otel.py`); one of each poll would bury them.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    answers = Counter[int]()
    app.state.front = front
    app.state.view = view
    app.state.metrics = ServerMetrics(answers)
    for part in ROUTES:
        app.include_router(part.router, prefix=PREFIX)
    app.include_router(console.metrics_router)
    app.add_middleware(PlainRoutes, routers=[part.router for part in ROUTES], prefix=PREFIX)
    error_response.install(app)
    app.add_middleware(ApiKeyLayer, keys=front.control.door)
    app.add_middleware(AnswerCount, counts=answers)
    return app
