"""Reading a body within its limits."""

from __future__ import annotations

import anyio
import pytest
from fastapi import Request
from lilo_engine.errors import TooSlow
from lilo_engine.requests.body import BodyLimits, read_body
from lilo_engine.requests.error_response import error_response

pytestmark = pytest.mark.anyio


def request_of(pieces: list[bytes], pause_s: float) -> Request:
    """A request whose client sends one piece after each pause, and then nothing more."""
    waiting = list(pieces)

    async def receive():
        await anyio.sleep(pause_s)
        if not waiting:
            await anyio.sleep_forever()
        piece = waiting.pop(0)
        return {"type": "http.request", "body": piece, "more_body": piece != b"end"}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"9")]}
    return Request(scope, receive)


async def test_a_body_in_pieces_is_read_whole():
    body = await read_body(request_of([b"one", b"two", b"end"], 0.0), BodyLimits())
    assert body.data == b"onetwoend"


@pytest.mark.parametrize(
    ("pieces", "limits"),
    [
        ([b"one"], BodyLimits(pause_s=0.05)),
        ([b"x"] * 1000, BodyLimits(pause_s=60.0, total_s=0.05)),
    ],
    ids=["one that stops", "one that trickles"],
)
async def test_a_slow_body_is_refused_so_that_it_is_sent_again(pieces, limits):
    with anyio.fail_after(20), pytest.raises(TooSlow) as refused:
        await read_body(request_of(pieces, 0.01), limits)
    answer = error_response(refused.value)
    assert answer.status_code == 408
    assert answer.headers["connection"] == "close"
