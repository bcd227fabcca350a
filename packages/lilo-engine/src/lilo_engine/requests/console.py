"""What a console, a dashboard and `lilo trace` and `lilo report` ask for. Reads; changes nothing.

Only the engine knows these things; a front asks it (`console/engine_view.py`). A key sees what concerns its
own models, an operator's key everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import anyio
from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.console.engine_view import EngineView, nothing_ran
from lilo_engine.console.metrics import CONTENT_TYPE, ServerMetrics
from lilo_engine.console.share import (
    Sees,
    models_in,
    share_of_metrics,
    share_of_overview,
    share_of_trace,
)
from lilo_engine.control.access import owners_of
from lilo_engine.control.view import View
from lilo_engine.errors import NotFound
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.requests.front import front_of, view_of
from lilo_engine.requests.json_response import json_response

router = APIRouter()
metrics_router = APIRouter()
"""Outside the API's prefix, where Prometheus looks."""


@router.get("/console/state")
async def state(request: Request) -> Response:
    """Phase, queue with reasons, lanes, models."""
    front, overview = front_of(request), await _engine_view(request).overview()
    sees = await _sees(request, models_in(overview, {}))
    trainer, sampler = await front.engine.state(), await front.sampling.state()
    health = trainer.health
    body: dict[str, object] = {
        "definition": front.definition.name,
        "trainer": {
            "phase": trainer.phase,
            "epoch": trainer.epoch,
            "last_failure": trainer.last_failure,
            "last_completed": None if health is None else health.last_completed,
            "progress_age_s": None if health is None else health.age_s,
            "completed_commands": None if health is None else health.completed_commands,
        },
        "sampler": {
            "phase": sampler.phase,
            "last_failure": sampler.last_failure,
            "unfinished_requests": sampler.unfinished_requests,
            "loaded_adapters": await _adapters(view_of(request), sampler.loaded_adapters),
        },
        **share_of_overview(overview, sees),
    }
    return json_response(body)


@router.get("/console/trace")
async def trace(request: Request) -> Response:
    """The timeline of the lanes as a Chrome trace."""
    document = await _engine_view(request).timeline()
    return json_response(share_of_trace(document, await _sees(request, models_in({}, document))))


@router.get("/console/runs/{run_id}")
async def report(request: Request, run_id: str) -> Response:
    """Where a run's time went."""
    if not await view_of(request).watches(run_id):
        raise NotFound(nothing_ran(run_id))
    return json_response(await _engine_view(request).report(run_id))


@metrics_router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The engine's metrics and this process's own in Prometheus' text format."""
    server = cast(ServerMetrics, request.app.state.metrics)
    text = await _engine_view(request).metrics()
    caller = view_of(request).caller
    if not caller.operator:
        text = share_of_metrics(text, owners_of(caller))
    polls = front_of(request).polls.num_waiting
    text += server.text(tasks=len(anyio.get_running_tasks()), polls=polls)
    return Response(text, media_type=CONTENT_TYPE)


async def _sees(request: Request, model_ids: Iterable[str]) -> Sees:
    """Which of the models the caller may be shown."""
    view = view_of(request)
    seen = {model_id for model_id in model_ids if await view.watches(model_id)}
    return seen.__contains__


async def _adapters(view: View, names: Iterable[str]) -> list[str]:
    """Names of adapters (`tinker://...@attempt`) of runs that the caller may be shown."""
    return [
        name
        for name in names
        if await view.watches(CheckpointRef.parse(name.partition("@")[0]).run_id)
    ]


def _engine_view(request: Request) -> EngineView:
    return cast(EngineView, request.app.state.view)
