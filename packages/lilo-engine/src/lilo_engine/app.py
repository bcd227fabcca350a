"""Composition root: the only file that knows every part. Builds the HTTP app; its lifespan is one task group.

    launchers -> Engine, SamplingManager -> Front -> routes
    Records + volume -> Control -> journal (to the engine), sweeper

`lilo serve` passes launchers that start processes; tests and benchmarks pass those that stay in memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio
from fastapi import FastAPI
from lilo_definitions import Definition, resolve_source

from lilo_engine.commands.launcher import Launcher, ProcessLauncher
from lilo_engine.config import DataFolder
from lilo_engine.console.metrics import Metrics, Sources
from lilo_engine.control.control import Control
from lilo_engine.control.records import Records
from lilo_engine.control.sweeper import Sweeper, SweepSettings
from lilo_engine.engine import Engine
from lilo_engine.requests import (
    checkpoints,
    console,
    error_response,
    future_list,
    futures,
    models,
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
from lilo_engine.requests.front import Front, FrontSettings
from lilo_engine.requests.plain_route import PlainRoutes
from lilo_engine.sampling.launcher import ProcessSamplerLauncher, SamplerLauncher
from lilo_engine.sampling.manager import SamplingManager
from lilo_engine.storage import open_checkpoints

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
    unknown,
)
"""Matched in this order, so that what is asked most is found first; `unknown` matches everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits of a server that no definition states."""

    front: FrontSettings = field(default_factory=FrontSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    drain_s: float = 5.0
    """For running commands and publications when the server stops; it has to be gone within 15 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server is built from."""

    definition: Definition
    data: DataFolder
    launcher: Launcher
    """How trainers are started."""
    sampler_launcher: SamplerLauncher
    """How sampling engines are started."""
    control: Control
    settings: ServerSettings = field(default_factory=ServerSettings)

    @classmethod
    def of_processes(
        cls, definition: Definition, data: DataFolder, settings: ServerSettings
    ) -> Parts:
        """A trainer and a sampling engine in processes of their own; the folder must exist."""
        return cls(
            definition=definition,
            data=data,
            launcher=ProcessLauncher(
                definition=definition,
                checkpoints_root=data.checkpoints,
                log_path=data.logs / "backend.log",
            ),
            sampler_launcher=ProcessSamplerLauncher(
                definition=definition, log_file=data.logs / "sampler.log"
            ),
            control=open_control(data),
            settings=settings,
        )


def open_control(data: DataFolder, clock: Callable[[], float] = time.time) -> Control:
    """The control plane of a data folder."""
    return Control.over(Records.at(data.root), open_checkpoints(data.checkpoints), clock)


def build_app(parts: Parts) -> FastAPI:
    """The app. Its parts run while its lifespan does; `app.state.front` is what routes work with."""
    control, definition = parts.control, parts.definition
    engine = Engine(definition=definition, launcher=parts.launcher, journal=control.journal)
    manager = SamplingManager(definition=definition, launcher=parts.sampler_launcher)
    sweep = replace(parts.settings.sweep, unnamed_versions=definition.sampler.ephemeral_versions)
    sweeper = Sweeper(control, engine, manager, sweep)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            tasks.start_soon(manager.run)
            tasks.start_soon(sweeper.run, control.clock)
            yield
            # What is being published ends well; what only waits does not start any more.
            with anyio.move_on_after(parts.settings.drain_s):
                await engine.drain()
            tasks.cancel_scope.cancel()
        control.records.close()

    app = FastAPI(title="lilo", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.front = Front(
        definition=definition,
        model_folder=resolve_source(definition.model.source),
        engine=engine,
        sampling=manager,
        control=control,
        settings=parts.settings.front,
    )
    answers = Counter[int]()
    app.state.engine = engine
    app.state.metrics = Metrics(Sources(recorder=engine.recorder, answers=lambda: answers))
    for part in ROUTES:
        app.include_router(part.router, prefix=PREFIX)
    app.include_router(console.metrics_router)
    app.add_middleware(PlainRoutes, routers=[part.router for part in ROUTES], prefix=PREFIX)
    error_response.install(app)
    app.add_middleware(ApiKeyLayer, keys=control.door)
    app.add_middleware(AnswerCount, counts=answers)
    return app
