"""Processes: one engine and two fronts over one PostgreSQL, the SDK at each front; then a front, the engine, and their order are killed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import tinker
from _proof import LIMIT_S, Proof, adam, datum, largest_difference, logprobs, outcome, step, tokens
from lilo_engine.bench.client import datums, timed_now
from lilo_engine.bench.wire import Wire, held_polls
from lilo_engine.bench.wire_model import WireModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.control.postgres import database, postgres_server, why_not
from tests.processes.command import Command, engine, front

KEY = "tml-proof-of-processes"
DATA = [datum(tokens(seed, 24)) for seed in (1, 2)]
WAITERS = 1024
"""Polls at one front."""
HEARTBEATS = 200
ARRIVE_S = 8.0
"""For that many polls to have reached the engine, on a busy machine too."""
IN_FLIGHT = 32
"""Requests that wait in the engine when it is killed."""
DEFINITE_S = 30.0
"""From the kill to an error, the start of the next engine's process included; without it, seconds."""


@dataclass
class _Site:
    """One engine and two fronts."""

    data_dir: Path
    url: str
    stack: ExitStack
    engine: Command
    fronts: list[Command]

    def new_engine(self) -> Command:
        return self.stack.enter_context(engine(self.data_dir, self.url))

    def service(self, index: int) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.fronts[index].url, api_key=KEY)

    def http(self, index: int) -> httpx.Client:
        headers = {"X-API-Key": KEY}
        base_url = f"{self.fronts[index].url}/api/v1/"
        return self.stack.enter_context(
            httpx.Client(base_url=base_url, headers=headers, timeout=60)
        )


@contextmanager
def _site() -> Iterator[_Site]:
    with (
        tempfile.TemporaryDirectory(prefix="lilo-proof-") as folder,
        postgres_server() as server,
        database(server) as url,
        ExitStack() as stack,
    ):
        data_dir = Path(folder)
        first = stack.enter_context(engine(data_dir, url)).wait_ready()
        fronts = [stack.enter_context(front(data_dir, url, key=KEY)) for _ in range(2)]
        for each in fronts:
            each.wait_ready()
        yield _Site(data_dir=data_dir, url=url, stack=stack, engine=first, fronts=fronts)


def _trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=3).result(timeout=LIMIT_S)


def _two_fronts(proof: Proof, site: _Site) -> None:
    """Each client trains through a front of its own; a result is fetched through the other one."""
    clients = [_trainer(site.service(index)) for index in range(2)]
    losses = [[step(client, DATA) for _ in range(3)] for client in clients]
    proof.equal("the same three losses through either front", losses[0] == losses[1], True)
    proof.equal("the loss falls", losses[0][2] < losses[0][0], True)
    one, two = site.http(0), site.http(1)
    model_id = clients[0].get_info().model_id
    body = {"model_id": model_id, "seq_id": 7, "adam_params": {}}
    request_id = one.post("optim_step", json=body).json()["request_id"]
    answer = two.post("retrieve_future", json={"request_id": request_id})
    proof.equal("a future submitted at one front, asked for at the other", answer.status_code, 200)


def _many_waiters(proof: Proof, site: _Site) -> None:
    """Clients that wait at a front cost the others there nothing, although each wait is a call to the engine."""
    url = site.fronts[0].url
    with Wire(url, KEY) as wire:
        model = WireModel.create(wire)
        model.skip_number()
        request_ids = [model.forward_backward(datums(1, 2)) for _ in range(64)]
        timed_now(model.heartbeat, 20)
        alone = timed_now(model.heartbeat, HEARTBEATS)
        with held_polls(url, request_ids, WAITERS, KEY):
            arriving = timed_now(model.heartbeat, HEARTBEATS)
            # Each that arrives begins a call to the engine, which takes the front a millisecond.
            settled_s = time.monotonic() + ARRIVE_S
            while time.monotonic() < settled_s:
                model.heartbeat()
            beside = timed_now(model.heartbeat, HEARTBEATS)
    proof.figure("heartbeat at a front, alone", alone, "reported", True)
    proof.figure(f"the same while {WAITERS:,} come at once to wait", arriving, "reported", True)
    proof.figure(f"the same beside {WAITERS:,} that wait", beside, "reported", True)
    proof.at_most(f"heartbeat beside {WAITERS:,} that wait, p50 ms", beside["p50_ms"], 5)


def _killed_front(proof: Proof, site: _Site) -> None:
    client = _trainer(site.service(0))
    step(client, DATA)
    port = int(site.fronts[0].url.rpartition(":")[2])
    site.fronts[0].kill()
    killed_s = time.monotonic()
    passed = client.forward_backward(DATA, "cross_entropy")
    stepped = client.optim_step(adam())
    again = front(site.data_dir, site.url, key=KEY, port=port)
    site.fronts[0] = site.stack.enter_context(again).wait_ready()
    back_s = time.monotonic() - killed_s
    error, _ = outcome(lambda: (passed.result(timeout=LIMIT_S), stepped.result(timeout=LIMIT_S)))
    proof.equal("numbers go on after kill -9 of a front, with the same client", error, None)
    done_s = time.monotonic() - killed_s
    proof.at_most("seconds of delay beside the start of the next front", done_s - back_s, 10)


def _killed_engine(proof: Proof, site: _Site) -> None:
    clients = [_trainer(site.service(index)) for index in range(2)]
    saved: list[tuple[str, list[list[float]]]] = []
    for client in clients:
        step(client, DATA)
        path = client.save_state("kept").result(timeout=LIMIT_S).path
        saved.append((path, logprobs(client, DATA)))
    http = site.http(1)
    model_id = clients[0].get_info().model_id
    in_flight: list[str] = []
    for number in range(100, 100 + IN_FLIGHT):
        body = {"model_id": model_id, "seq_id": number, "adam_params": {}}
        in_flight.append(http.post("optim_step", json=body).json()["request_id"])
    site.engine.kill()
    killed_s = time.monotonic()
    following = site.new_engine()
    statuses: set[int] = set()
    for request_id in in_flight:
        while True:
            answer = http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                break
        statuses.add(answer.status_code)
    proof.equal(f"{IN_FLIGHT} futures in flight at kill -9 of the engine", sorted(statuses), [410])
    proof.at_most("seconds to the last of these errors", time.monotonic() - killed_s, DEFINITE_S)
    error, _ = outcome(lambda: clients[1].optim_step(adam()))
    proof.figure(
        "what the SDK's own client of a lost model is told",
        (error or "nothing")[:200],
        "the model ended",
        error is not None and "ended" in error,
    )
    following.wait_ready()
    proof.equal("epochs between the engines", following.epoch - site.engine.epoch, 1)
    site.engine = following
    _restored(proof, site, saved)


def _restored(proof: Proof, site: _Site, saved: list[tuple[str, list[list[float]]]]) -> None:
    rest = tinker.RestClient(base_url=site.fronts[0].url, api_key=KEY)
    listed = loadable = 0
    difference = 0.0
    for path, before in saved:
        run_id = path.removeprefix("tinker://").split("/")[0]
        found = rest.list_checkpoints(run_id).result(timeout=LIMIT_S).checkpoints
        listed += [each.tinker_path for each in found] == [path]
        service = site.service(1)
        resumed = service.create_training_client_from_state_with_optimizer(path)
        client = resumed.result(timeout=LIMIT_S)
        difference = max(difference, largest_difference(before, logprobs(client, DATA)))
        loadable += step(client, DATA) > 0
    proof.equal("checkpoints listed after the engine's restart", listed, len(saved))
    proof.equal("and loaded into models that train on", loadable, len(saved))
    proof.at_most("difference of logprobs after loading", difference, 1e-6)


def _second_engine(proof: Proof, site: _Site) -> None:
    began_s = time.monotonic()
    second = site.new_engine()
    code = second.wait_end(LIMIT_S)
    proof.at_most("seconds to the refusal of a second engine", time.monotonic() - began_s, 30)
    named = f"pid {site.engine.process.pid}" in second.output and site.engine.url in second.output
    proof.equal("its exit code, and whether the first is named", [code, named], [1, True])


def _stopped_engine(proof: Proof, site: _Site) -> None:
    client = _trainer(site.service(0))
    step(client, DATA)
    site.engine.signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    following = site.new_engine().wait_ready()
    proof.at_most(
        "seconds from SIGSTOP of an engine to the next one's first model",
        time.monotonic() - stopped_s,
        90,
    )
    error, seconds = outcome(lambda: client.optim_step(adam()))
    proof.equal("the lost model's client hears of it", error is not None, True)
    proof.at_most("seconds to that error", seconds, 5)
    resumed = _trainer(site.service(1))
    first = step(resumed, DATA)
    site.engine.signal(signal.SIGCONT)
    code = site.engine.wait_end(LIMIT_S)
    taken = f"took it (epoch {following.epoch})" in site.engine.output
    proof.equal(
        "exit code of the one that wakes, and whether it says why", [code, taken], [1, True]
    )
    proof.equal("the other one trains on", step(resumed, DATA) < first, True)
    site.engine = following


def main() -> None:
    """Run all parts, one after another, on one site."""
    os.environ["TINKER_TELEMETRY"] = "0"
    proof = Proof("processes")
    reason = why_not()
    if reason is not None:
        proof.figure("PostgreSQL", reason, "can be started", False)
        proof.end()
    with _site() as site:
        for part in (
            _two_fronts,
            _many_waiters,
            _killed_front,
            _killed_engine,
            _second_engine,
            _stopped_engine,
        ):
            with proof.part(part.__name__.strip("_").replace("_", " ")):
                part(proof, site)
        print(site.engine.output, file=sys.stderr)
    proof.end()


if __name__ == "__main__":
    main()
