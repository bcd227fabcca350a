"""The server of the conformance tests, taken apart: engine and front are two servers that only HTTP connects."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
import uvicorn
from lilo_engine.app import EngineApp, build_front_app
from lilo_engine.cli.listener import listen, url_of
from lilo_engine.config import DataFolder
from lilo_engine.control.control import Control
from lilo_engine.control.engine_address import EngineAddress
from lilo_engine.control.lease import Lease
from lilo_engine.control.records import Records
from lilo_engine.parts import FrontParts, ServerSettings
from lilo_engine.remote.client import RemoteEngine
from lilo_engine.remote.line import open_line
from lilo_engine.requests.body import BodyLimits
from lilo_engine.requests.front import FrontSettings
from lilo_engine.requests.http_protocol import HttpProtocol
from lilo_engine.storage import open_checkpoints

from tests.conformance.conftest import KEY, STRANGERS_KEY, Served
from tests.conformance.conftest import rest as rest
from tests.conformance.conftest import service as service
from tests.processes import in_memory


@contextmanager
def in_thread(server: uvicorn.Server, run) -> Iterator[None]:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    server.should_exit = True
    thread.join(15)
    assert not thread.is_alive(), "the server did not stop within 15 s"


def server_of(app) -> uvicorn.Server:
    config = uvicorn.Config(
        app, http=HttpProtocol, log_level="warning", timeout_graceful_shutdown=1
    )
    return uvicorn.Server(config)


@contextmanager
def engine_in_thread(data: DataFolder, slots: int = 1024) -> Iterator[EngineApp]:
    """An engine that fronts find by the records of a data folder."""
    records = Records.at(data.root)
    listener = listen("127.0.0.1", 0)
    lease = Lease.take(records, "an engine in a thread", address=url_of(listener))
    app = EngineApp.of(in_memory.parts(data, records, lease, slots))
    server = server_of(app.asgi)
    with in_thread(server, lambda: server.run(sockets=[listener])):
        yield app


@contextmanager
def front_in_thread(data: DataFolder, settings: FrontSettings) -> Iterator[str]:
    """A front for the engine of a data folder's records; its URL."""
    records = Records.of_engine(data.root)
    control = Control.of_front(records, open_checkpoints(data.checkpoints), time.time)
    control.keys.create("test", time.time(), key=KEY, operator=True)
    control.keys.create("stranger", time.time(), key=STRANGERS_KEY)
    listener = listen("127.0.0.1", 0)
    server = server_of(None)

    async def main() -> None:
        async with open_line(EngineAddress(records).find) as line:
            hello = await RemoteEngine(line).hello(20)
            parts = FrontParts(
                hello=hello, line=line, control=control, settings=ServerSettings(front=settings)
            )
            server.config.app = build_front_app(parts)
            await server.serve(sockets=[listener])

    with in_thread(server, lambda: anyio.run(main)):
        yield url_of(listener)


@contextmanager
def serve_apart(data_dir: Path, settings: FrontSettings) -> Iterator[Served]:
    data = DataFolder(root=data_dir)
    data.create()
    with engine_in_thread(data), front_in_thread(data, settings) as url:
        headers = {"X-API-Key": KEY}
        with httpx.Client(base_url=url, headers=headers, timeout=20) as http:
            deadline = time.monotonic() + 20
            while http.get("/api/v1/healthz").status_code != 200:
                assert time.monotonic() < deadline, "the server was not ready within 20 s"
            yield Served(url=url, http=http, data_dir=data_dir)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_apart(tmp_path_factory.mktemp("apart"), FrontSettings(long_poll_s=5.0)) as each:
        yield each


@pytest.fixture(scope="session")
def fussy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As its namesake in one process: polls for a moment only, announces results, takes bodies up to 1 MiB."""
    settings = FrontSettings(
        long_poll_s=0.05,
        inline_result_bytes=64,
        body=BodyLimits(wire_bytes=1 << 20, decompressed_bytes=1 << 20),
    )
    with serve_apart(tmp_path_factory.mktemp("fussy"), settings) as each:
        yield each
