"""What an HTTP client gets of the web server's connections, byte by byte."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
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

pytestmark = pytest.mark.anyio

GET = "GET {} HTTP/1.1\r\nhost: here\r\n{}\r\n"
LARGE_BYTES = 3_000_000


class Site:
    """A server, and what its handlers wait for."""

    def __init__(self) -> None:
        self.go_on = anyio.Event()
        self.app = Starlette(
            routes=[
                Route("/small", self.small),
                Route("/large", self.large),
                Route("/parts", self.parts),
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


async def received(stream: SocketStream, size_bytes: int) -> bytes:
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
        data = await received(stream, LARGE_BYTES)
        first, _, rest = data.partition(b"all of it")
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        head, _, body = rest.partition(b"\r\n\r\n")
        assert f"content-length: {LARGE_BYTES}".encode() in head
        body += await received(stream, LARGE_BYTES - len(body))
        assert body == b"x" * LARGE_BYTES


async def test_the_last_answer_of_a_connection_is_whole_when_it_closes():
    async with Site().connected() as stream:
        await stream.send(GET.format("/small", "connection: close\r\n").encode())
        data = b"".join([piece async for piece in stream])
        assert data.endswith(b"all of it")


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
