"""retrieve_futures: one poll for all samples of a client, instead of one per sample; and joining a sampling session.

The SDK asks for both only if it is told to (`FrontSettings.one_poll_per_sampler`). A payload still comes through
`retrieve_future`.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.requests.body import read_json
from lilo_engine.requests.front import front_of, view_of
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.plain_route import plain_post
from lilo_engine.requests.wire_sampling import JoinSamplingSessionBody, RetrieveFuturesBody
from lilo_engine.sampling.completions import Whose
from lilo_engine.sampling.futures import Outcome, Sampled
from lilo_engine.sampling.replies import Completions

router = APIRouter()


@plain_post(router, "/retrieve_futures")
async def retrieve_futures(request: Request) -> Response:
    """Samples of one client that ended since the last poll; waits for the first of them."""
    front = front_of(request)
    wire = await read_json(request, RetrieveFuturesBody, front.settings.body)
    target = wire.target
    await view_of(request).sampling_session(target.sampling_session_id)
    whose = Whose(target.sampling_session_id, target.cloned_sampler_id)
    await front.sampling.retrieved(whose, wire.retrieved_request_ids)
    limit_s = front.settings.long_poll_s
    wait_s = limit_s if wire.timeout is None else min(wire.timeout, limit_s)

    async def look(some_s: float) -> Completions:
        return await front.sampling.completions(whose, wire.prev_cursor, some_s)

    found = await front.polls.answer(request, look, wait_s, pending=lambda seen: not seen.ended)
    completions = [_completion(id, outcome) for id, outcome in found.ended]
    return json_response({"completions": completions, "cursor": found.cursor})


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request) -> Response:
    """A block of numbers for one more copy of a sampling client."""
    front = front_of(request)
    wire = await read_json(request, JoinSamplingSessionBody, front.settings.body)
    await view_of(request).sampling_session(wire.sampling_session_id)
    counter = await front.sampling.join(wire.sampling_session_id)
    return json_response({"type": "join_sampling_session", "client_counter": counter})


def _completion(request_id: str, outcome: Outcome) -> dict[str, object]:
    if not isinstance(outcome, Sampled):
        return {"state": "failed", "request_id": request_id}
    size_bytes = outcome.result.size_bytes
    return {
        "state": "finished",
        "request_id": request_id,
        "response_payload_uncompressed_size": size_bytes,
    }
