"""`kill -9` in mid-step under two SDK clients, on a cluster: part of `failures.py`.

Both clients save, then step on for the reference. Then, for a rank, a raylet and the backend: both start a step that
takes seconds, the victim is killed, both are told, both resume from their save with one call on the group that was
rebuilt, make the steps of the reference, and end with its weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import tinker
from _proof import LIMIT_S, Proof, connect, datum, outcome, step, tokens
from lilo_engine.demo.server import LocalServer
from lilo_volume import LocalVolume, open_named

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.cluster.hosts import Cluster

DEFINITION = """\
extends: tiny
name: tiny-over-two
topology: {nodes: 2, cp: 2}
limits: {startup_timeout_s: 300}
"""
START_LIMIT_S = 300.0
TOLD_S = 15.0
"""From the kill to the error; a raylet's death is seen after Ray's health limit of 6 s at most."""
AGAIN_S = 240.0
"""For the group to be rebuilt: its processes import torch and Megatron; a node that was lost joins before."""
AFTER = 2
BACKEND = "lilo_engine.commands.serve_backend"


@dataclass
class Saved:
    """One client's save, and the weights of an undisturbed run from it."""

    number: int
    path: str
    weights: str


def kills(proof: Proof, ray: Cluster, folder: Path) -> None:
    """One server, three deaths."""
    (folder / "definition.yaml").write_text(DEFINITION, encoding="utf-8")
    os.environ["LILO_RAY_ADDRESS"] = ray.address
    server = LocalServer(str(folder / "definition.yaml"), folder / "data")
    try:
        server.start(START_LIMIT_S)
        with connect(server) as service:
            saved = [reference(service, server, number) for number in range(2)]
            for name, kill in victims(ray, server).items():
                with proof.part(f"kill -9 of {name}"):
                    one_death(proof, service, server, saved, name, kill)
    finally:
        server.stop()
        del os.environ["LILO_RAY_ADDRESS"]


def victims(ray: Cluster, server: LocalServer) -> dict[str, Callable[[], None]]:
    """By name: how it is killed."""

    def rank() -> None:
        second = ray.running[ray.hosts[1].name]
        _kill(psutil.Process(second.pid), "ray::RankActor")

    def raylet() -> None:
        ray.kill_ray(ray.hosts[1])
        ray.running.pop(ray.hosts[1].name).wait(30)
        ray.start_join(ray.hosts[1], 1, wait=False)

    def backend() -> None:
        _kill(psutil.Process(server.pid), BACKEND)

    return {"a rank": rank, "a raylet": raylet, "the backend": backend}


def reference(service: tinker.ServiceClient, server: LocalServer, number: int) -> Saved:
    """A client that saves after two steps, and its weights after two more."""
    client = service.create_lora_training_client("tiny", rank=8, seed=number).result(LIMIT_S)
    for index in range(2):
        step(client, batch(number, index))
    path = client.save_state("kept").result(timeout=LIMIT_S).path
    return Saved(number=number, path=path, weights=weights_after(client, server, number, "free"))


def one_death(
    proof: Proof,
    service: tinker.ServiceClient,
    server: LocalServer,
    saved: list[Saved],
    name: str,
    kill: Callable[[], None],
) -> None:
    """A step of seconds by both, a kill in its middle, and the way back."""
    clients = [resumed(service, one) for one in saved]
    long = [datum(tokens(index, 1000)) for index in range(96)]
    futures = [client.forward_backward(long, "cross_entropy") for client in clients]
    wait_until_busy(server)
    started = time.perf_counter()
    kill()
    for client, future in zip(("first", "second"), futures, strict=True):
        error, _ = outcome(lambda future=future: future)
        seconds = time.perf_counter() - started
        proof.at_most(f"{name}: seconds until the {client} client is told", seconds, TOLD_S)
        good = error is not None and "tinker://" in error
        proof.figure(
            f"{name}: what the {client} client is told",
            error,
            "the cause, and its last checkpoint",
            good,
        )
    for client, one in zip(("first", "second"), saved, strict=True):
        started = time.perf_counter()
        again = resumed(service, one)
        proof.at_most(
            f"{name}: seconds until the {client} client has resumed",
            time.perf_counter() - started,
            AGAIN_S,
        )
        ended = weights_after(again, server, one.number, name.replace(" ", "-"))
        proof.equal(f"{name}: weights of the {client} client", ended == one.weights, True)


def resumed(service: tinker.ServiceClient, one: Saved) -> tinker.TrainingClient:
    """A client that goes on from its save."""
    return service.create_training_client_from_state_with_optimizer(one.path).result(AGAIN_S)


def weights_after(
    client: tinker.TrainingClient, server: LocalServer, number: int, name: str
) -> str:
    """Digest of the adapter after the steps that follow the save."""
    for index in range(AFTER):
        step(client, batch(number, 10 + index))
    path = client.save_weights_for_sampler(name).result(timeout=LIMIT_S).path
    run, kind, name = path.removeprefix("tinker://").split("/")
    volume = LocalVolume(server.data_dir / "checkpoints")
    file = open_named(volume, run, kind, name).folder / "adapter_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def batch(number: int, index: int) -> list[tinker.types.Datum]:
    """Rows of odd lengths, the same for the same numbers."""
    return [
        datum(tokens(100 * number + 10 * index + row, length))
        for row, length in enumerate((23, 41))
    ]


def wait_until_busy(server: LocalServer) -> None:
    """Until ranks have computed for a moment since now."""
    ranks = [
        process
        for process in psutil.process_iter()
        if "ray::RankActor" in _command(process) and process.status() != psutil.STATUS_ZOMBIE
    ]
    assert ranks, f"no rank runs; the server said: {server.output}"
    before_s = sum(process.cpu_times().user for process in ranks)
    end_s = time.monotonic() + LIMIT_S
    while sum(process.cpu_times().user for process in ranks) < before_s + 1.0:
        assert time.monotonic() < end_s, "the step did not begin"
        time.sleep(0.05)


def _kill(tree: psutil.Process, words: str) -> None:
    found = [one for one in tree.children(recursive=True) if words in _command(one)]
    assert found, f"nothing below process {tree.pid} runs {words}"
    found[0].kill()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
