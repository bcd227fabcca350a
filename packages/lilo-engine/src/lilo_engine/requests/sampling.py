"""Sampling sessions and asample."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.control.checkpoints import Entry
from lilo_engine.control.sampling_sessions import SamplingSession, target_of
from lilo_engine.control.view import View
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.ids import direct_sampler_id, sampling_session_id_of
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.requests import decode_sample
from lilo_engine.requests.body import off_loop, parse_json, read_body, read_json
from lilo_engine.requests.front import Front, front_of, view_of
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.plain_route import plain_post
from lilo_engine.requests.wire_sampling import CreateSamplingSessionBody, SampleBody
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.room import Claim

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> Response:
    """A sampling client on the base model or on published sampler weights."""
    front = front_of(request)
    wire = await read_json(request, CreateSamplingSessionBody, front.settings.body)
    now_s = front.control.clock()
    view = view_of(request)
    await view.touch_session(wire.session_id)
    entry = None if wire.model_path is None else await _published(view, wire.model_path)
    session = SamplingSession(
        sampling_session_id=sampling_session_id_of(wire.session_id, wire.sampling_session_seq_id),
        session_id=wire.session_id,
        base_model=_base_model(front, wire.base_model, required=entry is None),
        ref=None if entry is None else entry.ref,
        attempt=None if entry is None else entry.attempt,
        moving=False,
    )
    await front.control.sampling_sessions.open(session, now_s)
    return json_response(
        {
            "type": "create_sampling_session",
            "sampling_session_id": session.sampling_session_id,
        }
    )


@router.get("/samplers/{sampler_id}")
async def get_sampler(request: Request, sampler_id: str) -> Response:
    """What a sampling client samples from."""
    session = await view_of(request).sampling_session(sampler_id)
    path = None if session.ref is None else str(session.ref)
    return json_response(
        {"sampler_id": sampler_id, "base_model": session.base_model, "model_path": path}
    )


@plain_post(router, "/asample")
async def asample(request: Request) -> Response:
    """Submit one prompt; the number of a sample is its client's own and implies no order."""
    front = front_of(request)
    body = await read_body(request, front.settings.body)
    wire = await off_loop(len(body.data), lambda: parse_json(body.data, SampleBody))
    view = view_of(request)
    session_id, seq_id, target = await _target(front, view, wire)
    info = await front.sampling.info()
    sample = await off_loop(
        len(body.data),
        lambda: decode_sample.sample_request(
            wire,
            adapter=None if target is None else target.name,
            context=front.definition.context,
            eos_tokens=info.eos_tokens,
            stop_strings=info.stop_strings,
        ),
    )
    ticket = await front.sampling.submit(
        session_id=session_id,
        seq_id=seq_id,
        fingerprint=decode_sample.fingerprint(sample),
        adapter=target,
        request=sample,
        claim=Claim(owner=view.caller.owner, max_bytes=view.caller.limits.max_waiting_bytes),
    )
    return json_response(
        {"request_id": ticket.request_id, "sample_sequence_ids": list(ticket.sequence_ids)}
    )


async def _target(
    front: Front, view: View, wire: SampleBody
) -> tuple[str, int, AdapterVersion | None]:
    """Whose number it is, the number, and the weights."""
    if wire.sampling_session_id is not None:
        if wire.seq_id is None:
            raise InvalidRequest("asample in a sampling session needs a seq_id")
        session = await view.sampling_session(wire.sampling_session_id)
        await view.touch_session(session.session_id)
        return wire.sampling_session_id, wire.seq_id, await view.target(session)
    # Older clients name the weights each time and have no number: each request stands for itself.
    alone = direct_sampler_id(view.caller.owner, secrets.token_hex(8))
    if wire.model_path is not None:
        return alone, 0, target_of(await _published(view, wire.model_path))
    _base_model(front, wire.base_model, required=True)
    return alone, 0, None


async def _published(view: View, path: str) -> Entry:
    """The sampler weights that a path names.

    Raises:
        InvalidRequest: it is no path, or names a training checkpoint.
        NotFound: nothing that the caller may read is published there.
    """
    ref = CheckpointRef.parse(path)
    if ref.kind != "sampler_weights":
        raise InvalidRequest(
            f"{path!r} names a training checkpoint; sampling takes .../sampler_weights/NAME, "
            "which save_weights_for_sampler makes"
        )
    return await view.checkpoint(ref)


def _base_model(front: Front, name: str | None, *, required: bool) -> str:
    served = front.definition.model.name
    if name is None and required:
        raise InvalidRequest(f"name a base_model ({served!r} is served here) or a model_path")
    if name is not None and name != served:
        raise InvalidRequest(f"base model {name!r} is not served here; there is {served!r}")
    return served
