"""Sessions and what an SDK asks before it has one: configuration, capabilities, health, telemetry."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.control.session_search import finish_reason
from lilo_engine.control.sessions import NewSession
from lilo_engine.control.sweeper import end_session
from lilo_engine.requests import decode
from lilo_engine.requests.body import pieces_of, read_json
from lilo_engine.requests.front import front_of, view_of
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.page import page_of
from lilo_engine.requests.plain_route import plain_post
from lilo_engine.requests.wire_json import CreateSessionBody, FinishSessionBody, SessionBody

MAX_DETAIL = 4096
"""Characters of what a client says at the end of its session: the end of a traceback fits."""

_log = logging.getLogger(__name__)
router = APIRouter()


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """200 only when a model could be created and sampled from now, with the last progress of both sides; else 503."""
    front = front_of(request)
    readiness = await front.readiness()
    if readiness.ready:
        return json_response({"status": "ok", "detail": readiness.words, **readiness.progress})
    return json_response(
        {"status": "starting", "detail": readiness.words, **readiness.progress}, 503
    )


@router.post("/client/config")
async def client_config(request: Request) -> Response:
    """Flags for the SDK; those left out have its defaults."""
    one_poll = front_of(request).settings.one_poll_per_sampler
    return json_response(
        {
            "pjwt_auth_enabled": False,
            "credential_default_source": "api_key",
            "sample_use_retrieve_futures": one_poll,
            "sample_join_sampling_session": one_poll,
        }
    )


@router.post("/client/dynamic_config")
async def client_dynamic_config(request: Request) -> Response:
    """Flags that may change: abandoned samples are worth a message, they hold a place in the sampler."""
    return json_response({"sample_cancel_enabled": True})


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request) -> Response:
    """The base model."""
    definition = front_of(request).definition
    model = {
        "model_name": definition.model.name,
        "max_context_length": definition.context,
        "trainable": True,
        "sampleable": True,
    }
    return json_response({"supported_models": [model]})


@router.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Accepted and dropped; an answer that fails would hold up the client's own errors."""
    async for _ in pieces_of(request, front_of(request).settings.body):
        pass
    return json_response({"status": "accepted"})


@router.post("/create_session")
async def create_session(request: Request) -> Response:
    """Start a session."""
    front = front_of(request)
    wire = await read_json(request, CreateSessionBody, front.settings.body)
    new = NewSession(
        sdk_version=wire.sdk_version,
        display_name=wire.display_name,
        project_id=wire.project_id,
        tags=wire.tags,
        user_metadata=decode.user_metadata(wire.user_metadata),
        owner=view_of(request).caller.owner,
    )
    session_id = await front.control.sessions.create(new, front.control.clock())
    caller = view_of(request).caller
    _log.info("key %s (owner %s) opened session %s", caller.key_id, caller.owner, session_id)
    return json_response({"type": "create_session", "session_id": session_id})


@plain_post(router, "/session_heartbeat")
async def session_heartbeat(request: Request) -> Response:
    """The client lives. 410 once its session has ended, 404 if it never was."""
    front = front_of(request)
    wire = await read_json(request, SessionBody, front.settings.body)
    await view_of(request).touch_session(wire.session_id)
    return json_response({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish_session(request: Request, session_id: str) -> Response:
    """End a session and its models; the first reason wins."""
    front = front_of(request)
    await view_of(request).check_session(session_id)
    wire = await read_json(request, FinishSessionBody, front.settings.body)
    # Cut, not refused: nothing may keep a session from ending.
    detail = None if wire.detail is None else wire.detail[:MAX_DETAIL]
    reason = finish_reason(wire.reason.type[:MAX_DETAIL], detail)
    await end_session(
        front.control, front.engine, front.sampling, session_id, reason, front.control.clock()
    )
    return json_response({"status": "finished"})


@router.get("/sessions")
async def list_sessions(request: Request, limit: int = 20, offset: int = 0) -> Response:
    """Ids, newest first."""
    ids = await view_of(request).sessions(*page_of(limit, offset))
    return json_response({"sessions": ids})


@router.get("/sessions/{session_id}")
async def get_session(request: Request, session_id: str) -> Response:
    """The runs and sampling sessions of a session."""
    control = front_of(request).control
    row = await view_of(request).session(session_id)
    return json_response(
        {
            "training_run_ids": await control.runs.of_session(session_id),
            "sampler_ids": await control.sampling_sessions.of_session(session_id),
            "user_metadata": row.user_metadata,
            "display_name": row.display_name,
        }
    )
