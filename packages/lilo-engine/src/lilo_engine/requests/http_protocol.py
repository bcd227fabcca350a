"""HttpProtocol: uvicorn's, with the head of an answer and the body that follows it in one write.

uvicorn writes them apart: two calls of the system, and a client that is woken by the first only to wait for the second.
For an answer of a hundred bytes that is a tenth of what it costs.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

JOINED_BYTES = 64 * 1024
"""Of each of two writes; copying more costs more than a call of the system."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _joined: _JoinedWrites

    # A transport is whatever has its methods; the base class names asyncio's own.
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a connection over."""
        self._joined = _JoinedWrites(transport, self.loop)
        super().connection_made(cast("asyncio.Transport", self._joined))

    def eof_received(self) -> None:
        """The client sends nothing more; the event loop closes the connection after this, and it may still read."""
        self._joined.flush()
        super().eof_received()


class _JoinedWrites:
    """A transport that keeps a small write back until the next one, or until the event loop comes round."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._kept = b""

    def write(self, data: bytes) -> None:
        """Write, with what was kept; or keep it."""
        if len(data) > JOINED_BYTES:
            self.flush()
            self._transport.write(data)
        elif self._kept:
            self._transport.write(self._kept + data)
            self._kept = b""
        elif data:
            self._kept = bytes(data)
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was kept."""
        # A client that has left meanwhile gets nothing, and writing to it is an error.
        if self._kept and not self._transport.is_closing():
            self._transport.write(self._kept)
        self._kept = b""

    def close(self) -> None:
        """Close it, when all is written."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all else is the transport's own
        return getattr(self._transport, name)
