"""HttpProtocol: uvicorn's, whose answers leave in one write.

uvicorn writes the head of an answer and its body apart: two calls of the system, and a client that is woken by the first
only to wait for the second. For an answer of a hundred bytes that is a tenth of what it costs.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

JOINED_BYTES = 64 * 1024
"""Of a second write; copying a larger one costs more than a call of the system."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection over."""
        super().connection_made(cast("asyncio.Transport", _JoinedWrites(transport, self.loop)))


class _JoinedWrites:
    """A transport that keeps a first write back until the next one, or until the event loop comes round."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._kept = b""

    def write(self, data: bytes) -> None:
        """Write, with what was kept; or keep it."""
        if self._kept and len(data) <= JOINED_BYTES:
            self._transport.write(self._kept + data)
            self._kept = b""
        elif self._kept:
            self._flush()
            self._transport.write(data)
        elif data:
            self._kept = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close it, when all is written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        # A client that has left meanwhile gets nothing, and writing to it is an error.
        if self._kept and not self._transport.is_closing():
            self._transport.write(self._kept)
        self._kept = b""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all else is the transport's own
        return getattr(self._transport, name)
