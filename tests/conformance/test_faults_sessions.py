"""B11, B12: a body that unpacks to a gigabyte, and sessions that end when they should and not before.

Time is the server's own clock, which the tests move on.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest
import tinker
import zstandard
from lilo_definitions import get
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.control.sweeper import SweepSettings
from lilo_engine.requests.body import BodyLimits
from lilo_engine.requests.front import FrontSettings
from tinker.lib import queue_state_logger

from tests.conformance.conftest import KEY, Served, serve
from tests.conformance.test_ten_facts import ADAM, binary, example, send_binary
from tests.engine.conftest import HeldBackend

LIMIT_S = SweepSettings().session_idle_s
BATCH = [example([1, 50, 60, 70])]


# B11: a bomb.


class Memory(threading.Thread):
    """The most memory that this process had at any moment of a block, in bytes."""

    def __enter__(self) -> Memory:
        self.process, self.peak_bytes, self.ended = psutil.Process(), 0, threading.Event()
        self.before_bytes = self.process.memory_info().rss
        self.start()
        return self

    def run(self) -> None:
        while not self.ended.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, self.process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()

    @property
    def grown_bytes(self) -> int:
        return max(0, self.peak_bytes - self.before_bytes)


@pytest.mark.parametrize("sized", [True, False], ids=["with its size", "without"])
def test_b11_a_bomb_of_a_gibibyte_is_413_and_costs_less_memory_than_the_limit(served, sized):
    limit = BodyLimits().decompressed_bytes
    assert limit < 1 << 30
    model_id = served.model()
    packer = zstandard.ZstdCompressor(level=3, write_content_size=sized).compressobj(
        size=1 << 30 if sized else -1
    )
    zeros = bytes(1 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(1 << 10)) + packer.flush()
    assert len(bomb) < 1 << 17
    with Memory() as memory:
        refused = send_binary(served, bomb, **{"Content-Encoding": "zstd"})
    assert refused.status_code == 413
    assert memory.grown_bytes < limit
    assert served.post("get_info", {"model_id": model_id}).status_code == 200


# B12: sessions.


def wait_until(holds: Callable[[], bool]) -> None:
    """For what a server does by itself and tells nobody."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it did not come about within 10 s"
        time.sleep(0.01)


class Clock:
    """The server's clock: the real one, moved on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@dataclass
class Timed:
    """A server with one slot, whose clock and trainer the test holds."""

    served: Served
    clock: Clock
    launcher: MemoryLauncher

    @property
    def backend(self) -> HeldBackend:
        return self.launcher.started[-1].backend

    def beat(self, session_id: str) -> httpx.Response:
        return self.served.post("session_heartbeat", {"session_id": session_id})

    def wait_for_a_slot(self) -> tuple[str, httpx.Response]:
        """A session and the creation of its model, for which there is no slot."""
        session_id = self.served.session()
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny"}
        creation = self.served.post("create_model", body)
        waiting = self.served.retrieve(creation.json()["request_id"])
        assert waiting.status_code == 408
        assert waiting.json()["queue_state"] == "paused_capacity"
        assert "all 1 slots" in waiting.json()["queue_state_reason"]
        return session_id, creation

    def models(self) -> list[str]:
        state = self.served.http.get("/api/v1/console/state").json()
        return [model["model_id"] for model in state["models"]]

    def silence(self, heard: str) -> None:
        """Everybody but one session falls silent for a little over the limit."""
        self.clock.ahead_s += LIMIT_S - 5
        assert self.beat(heard).status_code == 200
        self.clock.ahead_s += 10


@pytest.fixture
def timed(tmp_path) -> Iterator[Timed]:
    clock, launchers = Clock(), []

    def launcher(definition, data):
        launchers.append(
            MemoryLauncher(
                definition=definition, checkpoints_root=data.checkpoints, factory=HeldBackend
            )
        )
        return launchers[0]

    for served in serve(
        tmp_path,
        FrontSettings(long_poll_s=0.2),
        definition=get("tiny").derive(lora={"slots": 1}),
        launcher=launcher,
        sweep=SweepSettings(interval_s=0.05),
        clock=clock,
    ):
        timed = Timed(served, clock, launchers[0])
        yield timed
        for command in list(timed.backend.held):
            timed.backend.let_go(command)


CLIENT = """
import sys, time, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
client = service.create_lora_training_client("tiny", rank=4).result(timeout=20)
print(client.get_info().model_id, flush=True)
time.sleep(60)
"""


def test_b12_the_slot_of_a_client_killed_with_9_is_free_one_sweep_after_the_limit(timed):
    command = [sys.executable, "-c", CLIENT, timed.served.url, KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        model_id = client.stdout.readline().strip()
        client.kill()
    session_id = model_id.split(":train:")[0]
    other, creation = timed.wait_for_a_slot()
    timed.silence(heard=other)
    began = time.monotonic()
    assert timed.served.finished(creation).json()["model_id"] == f"{other}:train:0"
    assert time.monotonic() - began < 5
    assert timed.beat(session_id).status_code == 410


def test_b12_a_heartbeat_that_stalls_for_less_than_the_limit_costs_nothing(timed):
    session_id = timed.served.session()
    model_id = timed.served.model(session_id)
    timed.clock.ahead_s += LIMIT_S - 1
    # Any call is a sign of life.
    passed = timed.served.finished(send_binary(timed.served, binary(model_id, 1, [1, 2, 3])))
    assert passed.status_code == 200
    timed.clock.ahead_s += LIMIT_S - 1
    assert timed.beat(session_id).status_code == 200


def test_b12_a_client_back_after_its_session_expired_is_told_the_way_back(timed):
    served = timed.served
    session_id = served.session()
    model_id = served.model(session_id)
    served.finished(send_binary(served, binary(model_id, 1, [1, 2, 3])))
    served.finished(
        served.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    )
    save = {"model_id": model_id, "seq_id": 3, "path": "kept"}
    path = served.finished(served.post("save_weights", save)).json()["path"]
    other, creation = timed.wait_for_a_slot()
    timed.silence(heard=other)
    served.finished(creation)
    gone = timed.beat(session_id)
    assert gone.status_code == 410
    assert "not heard of for 300 s" in gone.json()["detail"]
    late = send_binary(served, binary(model_id, 4, [1, 2, 3]))
    assert late.status_code == 410
    assert "checkpoint" in late.json()["detail"]
    served.post(f"sessions/{other}/finish", {})
    body = {"session_id": served.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    restored = served.finished(served.post("load_weights", body)).json()
    assert restored["type"] == "load_weights"


def test_b12_a_pass_that_runs_when_its_session_expires_ends_cleanly(timed):
    served = timed.served
    session_id = served.session()
    model_id = served.model(session_id)
    timed.backend.hold("forward_backward")
    runs = send_binary(served, binary(model_id, 1, [1, 2, 3]))
    assert timed.backend.reached["forward_backward"].wait(10)
    waits = send_binary(served, binary(model_id, 2, [1, 2, 3]))
    other, creation = timed.wait_for_a_slot()
    timed.silence(heard=other)
    # What waited has failed; what runs has not, and its slot is not free before it ends.
    failed = served.finished(waits).json()
    assert (failed["category"], failed["kind"]) == ("user", "gone")
    assert served.retrieve(creation.json()["request_id"]).status_code == 408
    timed.backend.let_go("forward_backward")
    assert served.finished(runs).headers["content-type"] == "application/x-protobuf"
    assert served.finished(creation).json()["model_id"] == f"{other}:train:0"


def test_b12_a_session_that_expires_while_its_model_waits_leaves_the_line(timed):
    served = timed.served
    holder = served.session()
    served.model(holder)
    dead, _ = timed.wait_for_a_slot()
    live, creation = timed.wait_for_a_slot()
    timed.clock.ahead_s += LIMIT_S - 5
    for session_id in (holder, live):
        assert timed.beat(session_id).status_code == 200
    timed.clock.ahead_s += 10
    wait_until(lambda: f"{dead}:train:0" not in timed.models())
    served.post(f"sessions/{holder}/finish", {})
    assert served.finished(creation).json()["model_id"] == f"{live}:train:0"
    assert ("create_adapter", f"{dead}:train:0") not in timed.backend.log


def test_a_client_that_waits_for_a_slot_is_told_so_by_the_sdk_and_then_served(
    timed, monkeypatch, caplog
):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    # The SDK says so after a quarter of an hour.
    monkeypatch.setattr(queue_state_logger, "PAUSE_GRACE_PERIOD", 0)
    holder = timed.served.session()
    timed.served.model(holder)
    service = tinker.ServiceClient(base_url=timed.served.url, api_key=KEY)
    creation = service.create_lora_training_client("tiny", rank=4)
    wait_until(lambda: "all 1 slots" in caplog.text)
    timed.served.post(f"sessions/{holder}/finish", {})
    client = creation.result(timeout=20)
    client.forward_backward(BATCH, "cross_entropy").result(timeout=20)
    client.optim_step(ADAM).result(timeout=20)
    service.close("success").result(timeout=20)
