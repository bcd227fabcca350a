"""Calls that this server does not offer. One that carries a number uses it up, so that its client goes on.

Without this a client that sends `save_weights_external`, or a call of a newer SDK, would wait for ever: everything
behind the number that never came is held back. Its route is the last one, and matches whatever no other does.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.errors import NotFound
from lilo_engine.operations.operation import Operation
from lilo_engine.requests.body import Body
from lilo_engine.requests.front import submit_numbered

router = APIRouter()

_INSTEAD = {
    "create_custom_loss": "forward_backward_custom computes the loss at the client, without it",
    "auth/token": "send the API key itself; `lilo keys create` makes one",
    "auth/apikey/me": "`lilo keys` lists, makes and revokes keys at the server",
    "audit": "`lilo serve` logs who did what",
    "billing/usage/events": "nothing is billed; sizes of checkpoints are in /checkpoints",
    "billing/usage/checkpoints/current": "nothing is billed; sizes of checkpoints are in /checkpoints",
}
"""What to do instead, by the path."""


@router.api_route("/{call:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
async def unknown(request: Request, call: str) -> Response:
    """Refuse the call, together with its number if it has one."""
    instead = _INSTEAD.get(call)
    hint = f"; {instead}" if instead else ""
    refusal = NotFound(f"this server does not offer {request.method} {request.url.path}{hint}")
    if request.method != "POST":
        raise refusal
    return await submit_numbered(request, call, _refuses(refusal))


def _refuses(refusal: NotFound) -> Callable[[Body], Operation]:
    def refuse(body: Body) -> Operation:
        raise refusal

    return refuse
