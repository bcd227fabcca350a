"""Request bodies: read within a limit, decompressed, and parsed as JSON against a pydantic model.

The framework's own body parsing is not used: it would answer 422 where a numbered request has to be refused
with its number, and it would parse megabytes on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect
from starlette.types import Message

from lilo_engine.control.access import Caller
from lilo_engine.errors import InvalidRequest, TooLarge, TooSlow, UnsupportedMedia
from lilo_engine.requests.compression import decompress

PROTOBUF = "application/x-protobuf"
_JSON = ("application/json", "")

INLINE_BYTES = 16 * 1024
"""Smaller bodies are parsed on the event loop: going to a thread costs more (about 0.1 ms) than parsing them."""

START_BYTES = 256
"""Of a protobuf body: model id and number stand in the first 140, see `wire_protobuf.identity_of`."""

_SHOWN_CHARACTERS = 60
"""Of a value that an error quotes."""
PATIENCE = 4
"""Times the limit that is read of a body that is too large, before the connection is cut."""

Wire = TypeVar("Wire", bound=BaseModel)
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Largest bodies that are accepted."""

    wire_bytes: int = 64 * 1024 * 1024
    """As sent. One datum of 250k tokens is 6 MB; the SDK splits batches at 5 MB."""
    decompressed_bytes: int = 128 * 1024 * 1024
    """After undoing the content encoding."""
    pause_s: float = 30.0
    """For the next bytes; the SDK sends what it has in one go."""
    total_s: float = 300.0
    """For all of it: 64 MB need 220 kB/s."""


@dataclass(slots=True, kw_only=True)
class Body:
    """A body as it came, with what its headers say about it."""

    data: bytes
    """Decompressed; of one that was taken, the start."""
    protobuf: bool
    """Else JSON."""

    def take(self) -> bytes:
        """All of it, for the caller to hold alone: megabytes would lie here while what they hold is made.

        The start of a protobuf body stays, which names model and number.
        """
        data, self.data = self.data, self.data[:START_BYTES]
        return data


async def read_body(
    request: Request, limits: BodyLimits, dropped: Callable[[bytes], None] | None = None
) -> Body:
    """Read and decompress a body.

    Args:
        request: Its body must not have been read.
        limits: Largest sizes that are accepted.
        dropped: Gets the pieces, as they came and in order, of a body that is too large to keep; called in a thread.

    Raises:
        TooLarge, UnsupportedMedia, InvalidRequest: see `compression.py`; also for the media type.
        TooSlow: it did not come within the limits.
    """
    limits = limits_of(request, limits)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != PROTOBUF and media not in _JSON:
        raise UnsupportedMedia(
            f"content type {media!r} is not spoken here; send application/json or {PROTOBUF}"
        )
    raw = await _read(request, limits, dropped)
    encoding = request.headers.get("content-encoding", "")
    data = raw
    if encoding:
        # Always in a thread: a few bytes may unpack to many.
        try:
            data = await anyio.to_thread.run_sync(
                lambda: decompress(raw, encoding, limit_bytes=limits.decompressed_bytes)
            )
        except TooLarge:
            if dropped is not None:
                await anyio.to_thread.run_sync(dropped, raw)
            raise
    return Body(data=data, protobuf=media == PROTOBUF)


def limits_of(request: Request, limits: BodyLimits) -> BodyLimits:
    """The server's limits, or those of the caller's key where they are lower."""
    caller: Caller | None = getattr(request.state, "caller", None)
    own = None if caller is None else caller.limits.largest_body_bytes
    if own is None:
        return limits
    return replace(
        limits,
        wire_bytes=min(limits.wire_bytes, own),
        decompressed_bytes=min(limits.decompressed_bytes, own),
    )


async def pieces_of(request: Request, limits: BodyLimits) -> AsyncGenerator[bytes]:
    """The body as it comes.

    Raises:
        TooSlow: it did not come within the limits.
        ClientDisconnect: its sender went away.
    """
    ends_s = anyio.current_time() + limits.total_s
    size, more = 0, True
    while more:
        message: Message | None = None
        with anyio.move_on_after(min(limits.pause_s, ends_s - anyio.current_time())):
            message = await request.receive()
        if message is None:
            raise TooSlow(
                f"the body came too slowly: {size} bytes of {request.headers.get('content-length', 'it')} were here when "
                f"{limits.pause_s:g} s without one more, or {limits.total_s:g} s in all, were over; send it again"
            )
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(piece)
        if piece:
            yield piece


async def off_loop(size_bytes: int, work: Callable[[], Out]) -> Out:
    """Run `work` in a worker thread when it is large, here when it is small."""
    if size_bytes < INLINE_BYTES:
        return work()
    return await anyio.to_thread.run_sync(work)


async def read_json(request: Request, wire: type[Wire], limits: BodyLimits) -> Wire:
    """Read a JSON body that has no number; see `parse_json`."""
    body = await read_body(request, limits)
    if body.protobuf:
        raise UnsupportedMedia(f"{request.url.path} takes application/json")
    return await off_loop(len(body.data), lambda: parse_json(body.data, wire))


def parse_json(data: bytes, wire: type[Wire]) -> Wire:
    """Parse JSON against a model; unknown fields are ignored, an empty body is an empty object.

    Raises:
        InvalidRequest: not JSON, or a field is missing or of a wrong type; each is named.
    """
    try:
        return wire.model_validate_json(data or b"{}")
    except ValidationError as error:
        found = "; ".join(_fault(item) for item in error.errors(include_url=False)[:5])
        raise InvalidRequest(f"the JSON body cannot be used: {found}") from error


def _fault(item: ErrorDetails) -> str:
    """One fault of a body: the field, what it holds if that is short, and what was expected."""
    field = ".".join(str(part) for part in item["loc"])
    value: object = item["input"]
    scalar = value is None or isinstance(value, bool | int | float | str)
    held = f" is {json.dumps(value)[:_SHOWN_CHARACTERS]}" if field and scalar else ""
    return f"{field or 'body'}{held}: {item['msg']}"


async def _read(
    request: Request, limits: BodyLimits, dropped: Callable[[bytes], None] | None
) -> bytes:
    """All of the body; what is over the limit is read and dropped, so that the client gets to read the refusal."""
    limit_bytes = limits.wire_bytes
    stated = request.headers.get("content-length", "")
    too_large = stated.isdecimal() and int(stated) > limit_bytes
    pieces: list[bytes] = []
    size = 0
    async for piece in pieces_of(request, limits):
        size += len(piece)
        pieces.append(piece)
        too_large = too_large or size > limit_bytes
        if too_large:
            for each in pieces:
                if dropped is not None:
                    await anyio.to_thread.run_sync(dropped, each)
                # Others have their turn: a body without a stated length was kept up to the limit.
                await anyio.lowlevel.checkpoint()
            pieces.clear()
        if size > PATIENCE * limit_bytes:
            break
    if too_large:
        raise TooLarge(_over(f"{stated or size} bytes", limit_bytes))
    return b"".join(pieces)


def _over(found: str, limit_bytes: int) -> str:
    return f"a body may be {limit_bytes} bytes long as sent, this one has {found}; send fewer data per request"
