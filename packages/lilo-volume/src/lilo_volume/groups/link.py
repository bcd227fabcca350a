"""Link: one connection between two ranks: frames of bounded length, never blocking, never past a deadline.

A frame is a kind (one byte), a length (four bytes, big-endian) and that many bytes. Used by `tcp.py` and
`rendezvous.py`.
"""

from __future__ import annotations

import enum
import selectors
import socket
import struct
import time
from collections.abc import Iterable

_HEAD = struct.Struct(">BI")
_COUNT = struct.Struct(">I")
_READ_BYTES = 256 * 1024
_READS_AT_ONCE = 64
"""So that one busy peer cannot keep others from being heard."""
MAX_GREETING_BYTES = 4096
"""Before a peer has shown that it knows the token, it gets no more memory than this."""

GRACE_S = 0.5
"""How long a rank waits beyond its own deadline for rank 0 to name the missing ones."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    GREETING = 1
    """A step of the handshake."""
    VALUE = 2
    """A rank's value for one collective."""
    RESULT = 3
    """All values of one collective."""
    GIVE_UP = 4
    """A rank's own deadline has passed."""
    FAILURE = 5
    """The error that every rank gets."""


_KINDS = frozenset(FrameKind)


class LinkClosed(Exception):
    """The peer closed the connection, or broke the rules of framing."""


class Link:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock`."""
        sock.setblocking(False)
        if sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.limit_bytes = MAX_GREETING_BYTES
        """The longest frame that is taken from the peer."""
        self.closed: str | None = None
        """Why nothing more will come, once that is so; frames that came before can still be taken."""
        self._received = bytearray()
        self._unsent = bytearray()

    def put(self, kind: FrameKind, body: bytes) -> None:
        """Queue a frame and send what the peer takes at once."""
        self._unsent += _HEAD.pack(kind, len(body))
        self._unsent += body
        self.push()

    @property
    def unsent(self) -> bool:
        """Whether queued bytes wait for the peer to take them."""
        return bool(self._unsent) and self.closed is None

    def push(self) -> None:
        """Send queued bytes, as many as the peer takes."""
        while self.unsent:
            try:
                # `send` may be handed only a part at a time, or a large frame would be copied for every part of it.
                sent = self.sock.send(memoryview(self._unsent)[:_READ_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._unsent.clear()
                self.pull()  # what it said before it left may tell why
                self._close(f"sending: {error.strerror or error}")
                return
            del self._unsent[:sent]

    def pull(self) -> None:
        """Take in what the peer has sent, up to what the longest frame needs."""
        for _ in range(_READS_AT_ONCE):
            if self.closed is not None or len(self._received) > _HEAD.size + self.limit_bytes:
                return
            try:
                data = self.sock.recv(min(_READ_BYTES, _HEAD.size + self.limit_bytes + 1))
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._close(f"receiving: {error.strerror or error}")
                return
            if not data:
                self._close("it closed the connection")
                return
            self._received += data

    def frame(self) -> tuple[FrameKind, bytes] | None:
        """The next whole frame, if it has come.

        Raises:
            LinkClosed: there is none and there will be none.
        """
        if len(self._received) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._received)
            if length > self.limit_bytes or kind not in _KINDS:
                self._received.clear()
                self._close(f"it sent a frame of kind {kind} and {length} bytes")
                raise LinkClosed(self.closed)
            if len(self._received) >= _HEAD.size + length:
                body = bytes(memoryview(self._received)[_HEAD.size : _HEAD.size + length])
                del self._received[: _HEAD.size + length]
                return FrameKind(kind), body
        if self.closed is not None:
            raise LinkClosed(self.closed)
        return None

    def close(self) -> None:
        """Close this end."""
        self.pull()  # closing with bytes unread could take back what was sent last
        self._close("this end is closed")

    def _close(self, why: str) -> None:
        if self.closed is None:
            self.closed = why
            self.sock.close()


def wait_for_news(links: Iterable[Link], until: float, *others: socket.socket) -> set[int]:
    """Wait until one of `links` can move bytes or one of `others` can be read, or `until` (monotonic) has passed.

    Bytes are moved. Returns the file numbers of those of `others` that can be read.
    """
    with selectors.DefaultSelector() as selector:
        for link in links:
            if link.closed is None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
                selector.register(link.sock, events, link)
        for sock in others:
            selector.register(sock, selectors.EVENT_READ)
        ready: set[int] = set()
        for key, events in selector.select(max(0.0, until - time.monotonic())):
            if not isinstance(key.data, Link):
                ready.add(key.fd)
                continue
            if events & selectors.EVENT_WRITE:
                key.data.push()
            if events & selectors.EVENT_READ:
                key.data.pull()
        return ready


def joined(parts: Iterable[bytes]) -> bytes:
    """Byte strings in one, each with its length before it."""
    return b"".join(piece for part in parts for piece in (_COUNT.pack(len(part)), part))


def split(data: bytes) -> list[bytes]:
    """What `joined` was given."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        (length,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        parts.append(data[at : at + length])
        at += length
    return parts
