"""forward_backward, forward (older clients) and optim_step."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.requests import decode
from lilo_engine.requests.front import submit_numbered
from lilo_engine.requests.plain_route import plain_post

router = APIRouter()


@plain_post(router, "/forward_backward")
async def forward_backward(request: Request) -> Response:
    """A pass; protobuf says inside whether it is forward only."""
    return await submit_numbered(request, "forward_backward", decode.forward_backward)


@router.post("/forward")
async def forward(request: Request) -> Response:
    """A forward-only pass of clients that speak JSON."""
    forward_only = partial(decode.forward_backward, forward_only=True)
    return await submit_numbered(request, "forward", forward_only)


@plain_post(router, "/optim_step")
async def optim_step(request: Request) -> Response:
    """An optimizer step."""
    return await submit_numbered(request, "optim_step", decode.optim_step)
