"""retrieve_future, as a long poll, and cancel_future.

Not ready is 408, which the SDK takes for "ask again at once"; failed for good is 200 with the error, because any
5xx would be asked for again until the client gives up minutes later.
"""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.control.view import View
from lilo_engine.errors import LiloError, NotFound
from lilo_engine.operations.result import Complete, Failed, Passed, Pending
from lilo_engine.requests import encode
from lilo_engine.requests.body import PROTOBUF, off_loop, read_json
from lilo_engine.requests.front import Front, front_of, view_of
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.plain_route import plain_post
from lilo_engine.requests.wire_sampling import FutureBody, RetrieveFutureBody
from lilo_engine.sampling.engine import SampleResult
from lilo_engine.sampling.futures import PREFIX as SAMPLE_PREFIX
from lilo_engine.sampling.futures import Sampled

router = APIRouter()


@plain_post(router, "/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """The result of a request, once it has one; it can be fetched again."""
    front = front_of(request)
    wire = await read_json(request, RetrieveFutureBody, front.settings.body)
    await _check(view_of(request), wire.request_id)
    announce_above = front.settings.inline_result_bytes if wire.allow_metadata_only else None
    state = await _state(front, request, wire.request_id, announce_above)
    match state:
        case Pending():
            return _pending(state)
        case Failed():
            return _failed(state.error)
        case Complete(result=Passed() as passed):
            return await _large(request, passed, announce_above)
        case Complete():
            return json_response(encode.result_json(state.result))
        case Sampled():
            return await _large(request, state.result, announce_above)


@router.post("/cancel_future")
async def cancel_future(request: Request) -> Response:
    """Give up a sample; operations of a model are never given up, since later ones build on them."""
    front = front_of(request)
    wire = await read_json(request, FutureBody, front.settings.body)
    if wire.request_id.startswith(SAMPLE_PREFIX):
        # Of what is not there nothing is left to give up, and a stranger's is not there.
        with contextlib.suppress(NotFound):
            await _check(view_of(request), wire.request_id)
            await front.sampling.cancel(wire.request_id)
    return json_response({"status": "cancelled"})


async def _check(view: View, request_id: str) -> None:
    """Refuse a future that is not the caller's.

    Raises:
        NotFound: as for one that never was.
    """
    if request_id.startswith(SAMPLE_PREFIX):
        await view.check_sample(
            request_id, request_id.removeprefix(SAMPLE_PREFIX).rpartition(":")[0]
        )
    else:
        await view.check_request(request_id)


async def _state(
    front: Front, request: Request, request_id: str, announce_above: int | None
) -> Pending | Complete | Failed | Sampled:
    async def look(wait_s: float) -> Pending | Complete | Failed | Sampled:
        if request_id.startswith(SAMPLE_PREFIX):
            return await front.retrieve_sample(request_id, wait_s, announce_above)
        return await front.retrieve(request_id, wait_s, announce_above)

    return await front.polls.answer(
        request,
        look,
        front.settings.long_poll_s,
        pending=lambda state: isinstance(state, Pending),
    )


def _pending(state: Pending) -> Response:
    body: dict[str, object] = {"type": "try_again", "queue_state": state.queue_state}
    if state.reason is not None:
        body["queue_state_reason"] = state.reason
    return json_response(body, 408)


def _failed(error: LiloError) -> Response:
    return json_response({"error": error.message, "category": error.category, "kind": error.kind})


async def _large(
    request: Request, result: Passed | SampleResult, announce_above: int | None
) -> Response:
    """A pass or a sample: announced first when it is big and the client asked for that, then binary."""
    size_bytes = result.size_bytes
    if announce_above is not None and size_bytes > announce_above:
        return json_response({"status": "complete_metadata", "response_payload_size": size_bytes})
    if PROTOBUF in request.headers.get("accept", ""):
        data = await off_loop(size_bytes, lambda: _binary(result))
        return Response(data, media_type=PROTOBUF)
    return await off_loop(size_bytes, lambda: json_response(_json(result)))


def _binary(result: Passed | SampleResult) -> bytes:
    if isinstance(result, Passed):
        return encode.passed_protobuf(result)
    return encode.sample_protobuf(result)


def _json(result: Passed | SampleResult) -> encode.JsonBody:
    if isinstance(result, Passed):
        return encode.result_json(result)
    return encode.sample_json(result)
