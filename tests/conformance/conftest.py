"""A real server, over a real socket, with trainer and sampler in memory; and the unmodified SDK as its client."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker
import uvicorn
from lilo_definitions import Definition, get
from lilo_engine.app import build_app
from lilo_engine.commands.launcher import Launcher, MemoryLauncher
from lilo_engine.config import DataFolder
from lilo_engine.control.sweeper import SweepSettings
from lilo_engine.parts import Parts, ServerSettings, open_control
from lilo_engine.requests.body import BodyLimits
from lilo_engine.requests.front import FrontSettings
from lilo_engine.requests.http_protocol import HttpProtocol
from lilo_engine.sampling.launcher import MemorySamplerLauncher

KEY = "tml-conformance"
STRANGERS_KEY = "tml-conformance-stranger"
"""Another tenant's."""
PROTOBUF = "application/x-protobuf"
READY_S = 100
"""A real trainer imports torch, on a machine that may be busy; one in memory is there at once."""


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    http: httpx.Client
    """With the key, for what the SDK cannot be made to do."""
    data_dir: Path

    def post(self, path: str, body: object = None, **options: object) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.http.post(f"/api/v1/{path}", **options)

    def session(self) -> str:
        return self.post("create_session", {"tags": [], "sdk_version": "0"}).json()["session_id"]

    def model(self, session_id: str | None = None, number: int = 0, **changes: object) -> str:
        """Create a model and wait until it is there."""
        body = {
            "session_id": session_id or self.session(),
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
            **changes,
        }
        return self.finished(self.post("create_model", body)).json()["model_id"]

    def sampler(self) -> str:
        """A sampling session on the base model."""
        body = {
            "session_id": self.session(),
            "sampling_session_seq_id": 0,
            "base_model": "tiny",
        }
        return self.post("create_sampling_session", body).json()["sampling_session_id"]

    def retrieve(
        self, request_id: str, *, accept: str = PROTOBUF, **body: object
    ) -> httpx.Response:
        """One poll."""
        return self.post(
            "retrieve_future", {"request_id": request_id, **body}, headers={"Accept": accept}
        )

    def finished(self, submitted: httpx.Response, accept: str = PROTOBUF) -> httpx.Response:
        """The answer of a future."""
        assert submitted.status_code == 200, submitted.text
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            answer = self.retrieve(submitted.json()["request_id"], accept=accept)
            if answer.status_code != 408:
                return answer
        raise AssertionError("the future did not finish within 10 s")


def _in_memory(definition: Definition, data: DataFolder) -> Launcher:
    return MemoryLauncher(definition=definition, checkpoints_root=data.checkpoints)


def serve(
    data_dir: Path,
    settings: FrontSettings,
    *,
    definition: Definition | None = None,
    launcher: Callable[[Definition, DataFolder], Launcher] | None = None,
    sweep: SweepSettings | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[Served]:
    """Run a server in a thread, with a trainer in memory unless another launcher is given."""
    # One server for many tests, and few of them end their sessions: a slot for each model of all of them.
    definition = definition or get("tiny").derive(lora={"slots": 1024})
    data = DataFolder(root=data_dir)
    data.create()
    control = open_control(data, clock)
    control.keys.create("test", time.time(), key=KEY)
    control.keys.create("stranger", time.time(), key=STRANGERS_KEY)
    parts = Parts(
        definition=definition,
        data=data,
        launcher=(launcher or _in_memory)(definition, data),
        sampler_launcher=MemorySamplerLauncher(definition),
        control=control,
        settings=ServerSettings(front=settings, sweep=sweep or SweepSettings()),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        build_app(parts), http=HttpProtocol, log_level="warning", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.Client(base_url=url, headers={"X-API-Key": KEY}, timeout=20) as http:
        deadline = time.monotonic() + READY_S
        while http.get("/api/v1/healthz").status_code != 200:
            assert time.monotonic() < deadline, f"the server was not ready within {READY_S} s"
            time.sleep(0.02)
        yield Served(url=url, http=http, data_dir=data_dir)
    server.should_exit = True
    thread.join(15)
    assert not thread.is_alive(), "the server did not stop within 15 s"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("data"), FrontSettings(long_poll_s=5.0))


@pytest.fixture(scope="session")
def fussy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Polls for a moment only, announces every result of more than 64 bytes first, takes bodies up to 1 MiB."""
    settings = FrontSettings(
        long_poll_s=0.05,
        inline_result_bytes=64,
        body=BodyLimits(wire_bytes=1 << 20, decompressed_bytes=1 << 20),
    )
    yield from serve(tmp_path_factory.mktemp("fussy"), settings)


@pytest.fixture
def service(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.ServiceClient]:
    """The SDK's client."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("TINKER_BASE_URL", served.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    client = tinker.ServiceClient()
    yield client
    client.close("success").result(timeout=20)


@pytest.fixture
def rest(served: Served) -> tinker.RestClient:
    """What the SDK asks without a session. Without an address it would ask the server that this process asked first."""
    return tinker.RestClient(base_url=served.url, api_key=KEY)
