"""What an HTTP client gets of the web server's connections, byte by byte, on the event loop that commands run."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketStream
from lilo_engine.cli.listener import listen
from lilo_engine.requests.long_polls import LongPolls
from lilo_engine.requests.web_server import WebServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio

GET = "GET {} HTTP/1.1\r\nhost: here\r\n{}\r\n"
LARGE_BYTES = 3_000_000


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Halves:
    """Answers `ab` in two parts; what else is to happen does, before the event loop comes round."""

    def __init__(self) -> None:
        self.after_head: Callable[[], None] = int
        self.after_all: Callable[[], None] = int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.after_head()
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})
        self.after_all()


class Site:
    """A server, and what its handlers wait for."""

    def __init__(self) -> None:
        self.go_on = anyio.Event()
        self.halves = Halves()
        self.app = Starlette(
            routes=[
                Route("/small", self.small),
                Route("/large", self.large),
                Route("/parts", self.parts),
                Route("/halves", self.halves),
                Route("/echo", self.echo, methods=["POST"]),
            ]
        )

    async def small(self, _: Request) -> Response:
        return PlainTextResponse("all of it")

    async def large(self, _: Request) -> Response:
        return Response(b"x" * LARGE_BYTES)

    async def parts(self, _: Request) -> Response:
        async def pieces() -> AsyncIterator[str]:
            yield "first"
            await self.go_on.wait()
            yield "last"

        return StreamingResponse(pieces())

    async def echo(self, request: Request) -> Response:
        return Response(await request.body())

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[SocketStream]:
        server, listener = WebServer(self.app, LongPolls()), listen("127.0.0.1", 0)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.run, listener)
                port = listener.getsockname()[1]
                async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
                    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    yield stream
                server.stop()


async def taken(stream: SocketStream, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        data += await stream.receive()
    return data


async def test_a_small_answer_comes_in_one_piece():
    def asked(port: int) -> list[bytes]:
        """By a client that is at the socket before the answer is."""
        with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
            pieces: list[bytes] = []
            for _ in range(200):
                raw.sendall(GET.format("/small", "").encode())
                pieces.append(raw.recv(4096))
                whole = pieces[-1]
                while not whole.endswith(b"all of it"):
                    whole += raw.recv(4096)
            return pieces

    async with Site().connected() as stream:
        port = stream.extra(anyio.abc.SocketAttribute.remote_port)
        pieces = await anyio.to_thread.run_sync(asked, port)
    assert all(piece.startswith(b"HTTP/1.1 200 OK\r\n") for piece in pieces)
    assert all(piece.endswith(b"\r\n\r\nall of it") for piece in pieces)


async def test_answers_to_requests_that_came_together_come_in_their_order():
    async with Site().connected() as stream:
        await stream.send(GET.format("/small", "").encode() + GET.format("/large", "").encode())
        data = await taken(stream, LARGE_BYTES)
        first, _, rest = data.partition(b"all of it")
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        head, _, body = rest.partition(b"\r\n\r\n")
        assert f"content-length: {LARGE_BYTES}".encode() in head
        body += await taken(stream, LARGE_BYTES - len(body))
        assert body == b"x" * LARGE_BYTES


@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        (GET.format("/small", "connection: close\r\n"), b"\r\n\r\nall of it"),
        (GET.format("/halves", "connection: close\r\n"), b"\r\n\r\nab"),
        (GET.format("/small", "connection: close\r\n").replace("GET", "HEAD"), b"\r\n\r\n"),
        ("nonsense\r\n\r\n", b"Invalid HTTP request received."),
    ],
    ids=["whole", "parts", "head", "nonsense"],
)
async def test_the_last_answer_of_a_connection_is_whole_when_it_closes(asked: str, ends: bytes):
    async with Site().connected() as stream:
        await stream.send(asked.encode())
        data = b"".join([piece async for piece in stream])
        assert data.startswith(b"HTTP/1.1 ")
        assert data.endswith(ends)


@pytest.mark.parametrize(("method", "ends"), [("GET", b"\r\n\r\nab"), ("HEAD", b"\r\n\r\n")])
async def test_a_client_that_sends_nothing_more_gets_all_of_its_answer(method: str, ends: bytes):
    site = Site()

    def received(client: socket.socket) -> bytes:
        data = b""
        while piece := client.recv(4096):
            data += piece
        return data

    async with site.connected() as stream:
        port = stream.extra(anyio.abc.SocketAttribute.remote_port)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            site.halves.after_all = lambda: client.shutdown(socket.SHUT_WR)
            client.sendall(GET.format("/halves", "").replace("GET", method).encode())
            data = await anyio.to_thread.run_sync(received, client)
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert data.endswith(ends)


async def test_a_client_that_leaves_in_the_middle_of_an_answer_is_no_error(
    caplog: pytest.LogCaptureFixture,
):
    site, left = Site(), anyio.Event()
    async with site.connected() as stream:
        client = socket.create_connection(
            ("127.0.0.1", stream.extra(anyio.abc.SocketAttribute.remote_port)), timeout=20
        )
        # It resets the connection when it is closed.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        site.halves.after_all = lambda: (client.close(), left.set())
        client.sendall(GET.format("/halves", "").encode())
        await left.wait()
        await stream.send(GET.format("/small", "").encode())
        assert (await stream.receive()).endswith(b"all of it")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_what_there_is_of_an_answer_does_not_wait_for_the_rest():
    site = Site()
    async with site.connected() as stream:
        await stream.send(GET.format("/parts", "").encode())
        data = b""
        while b"first" not in data:
            data += await stream.receive()
        assert b"last" not in data
        site.go_on.set()
        while not data.endswith(b"0\r\n\r\n"):
            data += await stream.receive()
        assert b"last" in data


async def test_a_client_that_asks_first_is_told_to_send_its_body():
    async with Site().connected() as stream:
        head = (
            "POST /echo HTTP/1.1\r\nhost: here\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n"
        )
        await stream.send(head.encode())
        assert await stream.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await stream.send(b"body")
        assert (await stream.receive()).endswith(b"\r\n\r\nbody")
