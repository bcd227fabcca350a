"""Wire: HTTP over one socket with next to no time of its own, so that what is measured is the server's. Blocking.

The SDK and httpx take one to three milliseconds of a processor for a request, more than the server does. This takes
about 0.1 ms. Only what the measured server sends is understood: a status, a Content-Length, a body.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

from lilo_engine.bench.serve import KEY

LIMIT_S = 120.0
"""For an answer."""
POLLS_S = 20.0
"""For many polls to come, or to go: a server lets one wait for 25 s, and the first must not have ended by then."""
PROTOBUF = "application/x-protobuf"
JSON = "application/json"
_OK = 200
_PENDING = 408
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


class Wire:
    """One connection; requests go one after another."""

    def __init__(self, url: str, key: str = KEY) -> None:
        """Connect."""
        parts = urlsplit(url)
        self._head = f"Host: {parts.netloc}\r\nX-API-Key: {key}\r\n"
        self._stream = socket.create_connection((parts.hostname or "", parts.port or 80), LIMIT_S)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def send(
        self, path: str, body: bytes, media: str = JSON, accept: str = "*/*", verb: str = "POST"
    ) -> None:
        """Send a request; `receive` gets its answer."""
        head = (
            f"{verb} {path} HTTP/1.1\r\n{self._head}Content-Type: {media}\r\nAccept: {accept}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._stream.sendall(head.encode("ascii") + body)

    def receive(self) -> tuple[int, bytes]:
        """Status and body of the next answer.

        Raises:
            ConnectionError: the server closed the connection.
        """
        data = self._rest
        while (end := data.find(_HEAD_END)) < 0:
            data += self._more()
        head = data[:end].lower()
        at = head.find(_LENGTH)
        length = int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        end += len(_HEAD_END)
        while len(data) < end + length:
            data += self._more()
        self._rest = data[end + length :]
        return int(head[9:12]), data[end : end + length]

    def post(self, call: str, body: Mapping[str, object]) -> dict[str, Any]:
        """A call of the API with JSON both ways.

        Raises:
            RuntimeError: the answer is an error.
        """
        self.send(f"/api/v1/{call}", json.dumps(body).encode())
        return json.loads(self._good(call))

    def post_protobuf(self, call: str, body: bytes) -> dict[str, Any]:
        """The same with a protobuf body."""
        self.send(f"/api/v1/{call}", body, PROTOBUF)
        return json.loads(self._good(call))

    def get(self, path: str) -> bytes:
        """A page."""
        self.send(path, b"", verb="GET")
        return self._good(path)

    def until_ready(self) -> None:
        """Return when models can be created."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            self.send("/api/v1/healthz", b"", verb="GET")
            if self.receive()[0] == _OK:
                return
            assert time.monotonic() < deadline, f"the server was not ready within {LIMIT_S:g} s"
            time.sleep(0.02)

    def finished(self, request_id: str, accept: str = PROTOBUF) -> bytes:
        """The answer of a future, polled as the SDK polls."""
        body = json.dumps({"request_id": request_id}).encode()
        while True:
            self.send("/api/v1/retrieve_future", body, accept=accept)
            status, data = self.receive()
            if status != _PENDING:
                return _checked("retrieve_future", status, data)

    def _good(self, call: str) -> bytes:
        return _checked(call, *self.receive())

    def _more(self) -> bytes:
        data = self._stream.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data


@contextmanager
def held_polls(url: str, request_ids: Sequence[str], count: int, key: str = KEY) -> Generator[None]:
    """So many polls that wait for these futures while the context lasts; nobody reads their answers.

    They are with the server when the context begins, and no longer when it has ended: its own count says so.
    """
    with Wire(url, key) as looking:
        before = num_waiting_polls(looking)
        with ExitStack() as stack:
            for index in range(count):
                wire = stack.enter_context(Wire(url, key))
                body = json.dumps({"request_id": request_ids[index % len(request_ids)]}).encode()
                wire.send("/api/v1/retrieve_future", body)
            _until(lambda: num_waiting_polls(looking) >= before + count, f"{count} polls arrived")
            yield
        # A server may need a second to see that a client has left; whoever counts next must not count these.
        _until(lambda: num_waiting_polls(looking) <= before, f"{count} polls left")


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + POLLS_S
    while not holds():
        assert time.monotonic() < deadline, f"it took more than {POLLS_S:g} s until {what}"
        time.sleep(0.02)


def num_waiting_polls(wire: Wire) -> int:
    """Polls that wait at a server now, by its own count."""
    lines = wire.get("/metrics").decode().splitlines()
    name = "lilo_waiting_polls "
    return next(int(float(line.split()[1])) for line in lines if line.startswith(name))


def _checked(call: str, status: int, data: bytes) -> bytes:
    if status != _OK:
        raise RuntimeError(f"{call} answered {status}: {data[:300]!r}")
    return data
