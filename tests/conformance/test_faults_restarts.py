"""B01, B06, B07: an answer that is lost on its way, a server that is killed, a command that fails; through the SDK."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import tinker
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.errors import CommandFailed
from lilo_engine.requests.front import FrontSettings

from tests.conformance.conftest import KEY, serve
from tests.conformance.held_server import KEY as HELD_KEY
from tests.conformance.test_ten_facts import ADAM, example, trainer

BATCH = [example([1, 50, 60, 70])]


# B01: the answer is lost, and the SDK sends the call again.


class LossyProxy(BaseHTTPRequestHandler):
    """Passes every call on; of the first of each kind that is listed, the answer never reaches the client."""

    upstream = ""
    lossy: ClassVar[set[str]] = set()
    sent: ClassVar[list[str]] = []
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
        answer = httpx.request(
            self.command, self.upstream + self.path, content=body, headers=headers, timeout=30
        )
        verb = self.path.rsplit("/", 1)[-1]
        self.sent.append(verb)
        if verb in self.lossy:
            self.lossy.discard(verb)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers.get("content-type", "application/json"))
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_POST = _pass_on

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def lossy(served) -> Iterator[type[LossyProxy]]:
    """A proxy that loses the answers to one of each call that changes a model."""
    verbs = {"create_model", "forward_backward", "optim_step", "save_weights"}
    proxy = type("Proxy", (LossyProxy,), {"upstream": served.url, "lossy": verbs, "sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    yield proxy
    server.shutdown()
    server.server_close()


def trained(service: tinker.ServiceClient) -> list[float]:
    """Two steps and a save: what a pass gives then."""
    client = trainer(service, seed=1)
    for _ in range(2):
        client.forward_backward(BATCH, "cross_entropy").result(timeout=30)
        client.optim_step(ADAM).result(timeout=30)
    client.save_state("kept").result(timeout=30)
    passed = client.forward(BATCH, "cross_entropy").result(timeout=30)
    return passed.loss_fn_outputs[0]["logprobs"].tolist()


def test_b01_a_client_whose_answers_are_lost_trains_exactly_as_one_whose_are_not(service, lossy):
    expected = trained(service)
    troubled = tinker.ServiceClient(base_url=lossy.url, api_key=KEY)
    try:
        assert trained(troubled) == expected
    finally:
        troubled.close("success").result(timeout=20)
    assert not lossy.lossy, "no answer of these was lost"
    # Five passes were asked for in all, forward included, and one of them twice.
    assert lossy.sent.count("forward_backward") == 4
    assert lossy.sent.count("optim_step") == 3
    assert lossy.sent.count("create_model") == 2


# B06: a server that is killed in mid-queue.


class HeldServer:
    """A server process on a data folder and a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.conformance.held_server"]
        self.process = subprocess.Popen([*command, str(self.folder), str(self.port)])
        deadline = time.monotonic() + 40
        while not self._ready():
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server was not ready within 40 s"
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/api/v1/healthz").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldServer]:
    server = HeldServer(tmp_path)
    yield server
    server.kill()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_b06_a_server_killed_in_mid_queue_answers_for_what_was_in_flight_and_numbering_goes_on(
    held, monkeypatch
):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=held.url, api_key=HELD_KEY)
    client = trainer(service, seed=1)
    client.forward_backward(BATCH, "cross_entropy").result(timeout=20)
    client.optim_step(ADAM).result(timeout=20)
    path = client.save_state("kept").result(timeout=20).path
    (held.folder / "hold").touch()
    in_flight = [client.forward_backward(BATCH, "cross_entropy"), client.optim_step(ADAM)]
    held.kill()
    (held.folder / "hold").unlink()
    held.start()
    began = time.monotonic()
    for future in in_flight:
        with pytest.raises(Exception, match=r"gone|ended|restarted|no request") as error:
            future.result(timeout=30)
        assert not isinstance(error.value, TimeoutError)
    # The same client hears that its model is gone, and how to go on; nothing waits for a number that cannot come.
    with pytest.raises(tinker.APIStatusError, match="checkpoint") as gone:
        client.forward_backward(BATCH, "cross_entropy").result(timeout=30)
    assert gone.value.status_code == 410
    assert time.monotonic() - began < 20
    again = service.create_training_client_from_state_with_optimizer(path).result(timeout=20)
    fresh = tinker.ServiceClient(base_url=held.url, api_key=HELD_KEY)
    other = trainer(fresh, seed=1)
    for each in (again, other):
        each.forward_backward(BATCH, "cross_entropy").result(timeout=20)
        each.optim_step(ADAM).result(timeout=20)
    for each in (service, fresh):
        each.close("success").result(timeout=20)


# B07: a command that raises in the trainer.


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory):
    """A server whose trainer raises in the next pass when it is told so."""
    causes: list[Exception] = []

    class Failing(MemoryBackend):
        def forward_backward(self, batch):
            if causes:
                raise causes.pop()
            return super().forward_backward(batch)

    def launcher(definition, data):
        return MemoryLauncher(
            definition=definition, checkpoints_root=data.checkpoints, factory=Failing
        )

    for served in serve(tmp_path_factory.mktemp("failing"), FrontSettings(), launcher=launcher):
        yield served, causes


@pytest.mark.parametrize(
    "cause",
    [CommandFailed("CUDA out of memory"), RuntimeError("rank 1: device-side assert")],
    ids=["one command", "a rank"],
)
def test_b07_an_operation_that_failed_for_good_raises_within_two_seconds_with_its_cause(
    failing, cause, monkeypatch
):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    served, causes = failing
    service = tinker.ServiceClient(base_url=served.url, api_key=KEY)
    client = trainer(service)
    causes.append(cause)
    began = time.monotonic()
    with pytest.raises(tinker.RequestFailedError, match=str(cause)):
        client.forward_backward(BATCH, "cross_entropy").result(timeout=20)
    assert time.monotonic() - began < 2
    service.close("success").result(timeout=20)
