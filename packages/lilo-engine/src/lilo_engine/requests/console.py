"""What a console, a dashboard and `lilo trace` and `lilo report` ask for. Reads; changes nothing.

Only the process that holds the engine knows these things; `app.py` gives it to the routes.
"""

from __future__ import annotations

from typing import cast

import anyio
from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.console.chrome_trace import chrome_trace
from lilo_engine.console.metrics import CONTENT_TYPE, Metrics
from lilo_engine.console.run_report import run_report
from lilo_engine.engine import Engine
from lilo_engine.errors import NotFound
from lilo_engine.operations.operation import ModelId
from lilo_engine.requests.front import front_of
from lilo_engine.requests.json_response import json_response

router = APIRouter()
metrics_router = APIRouter()
"""Outside the API's prefix, where Prometheus looks."""


@router.get("/console/state")
async def state(request: Request) -> Response:
    """Phase, queue with reasons, lanes, models."""
    front, engine = front_of(request), _engine(request)
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
            "loaded_adapters": list(sampler.loaded_adapters),
        },
        **engine.overview(),
    }
    return json_response(body)


@router.get("/console/trace")
async def trace(request: Request) -> Response:
    """The timeline of the lanes as a Chrome trace."""
    return json_response(chrome_trace(_engine(request).recorder))


@router.get("/console/runs/{run_id}")
async def report(request: Request, run_id: str) -> Response:
    """Where a run's time went."""
    totals = _engine(request).recorder.runs.get(ModelId(run_id))
    if totals is None:
        raise NotFound(
            f"nothing of a run {run_id!r} ran since this server started; "
            "GET /api/v1/training_runs lists the runs there are"
        )
    num_devices = front_of(request).definition.topology.world_size
    return json_response(run_report(run_id, totals, num_devices=num_devices).as_dict())


@metrics_router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    found = cast(Metrics, request.app.state.metrics)
    text = found.text(await front_of(request).engine.state(), len(anyio.get_running_tasks()))
    return Response(text, media_type=CONTENT_TYPE)


def _engine(request: Request) -> Engine:
    return cast(Engine, request.app.state.engine)
