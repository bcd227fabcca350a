"""`kill -9` of the backend in mid-step is a definite error in under 5 s; lost records lose no checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import tinker
from _proof import (
    LIMIT_S,
    Proof,
    connect,
    datum,
    largest_difference,
    logprobs,
    outcome,
    step,
    tiny_server,
    tokens,
)
from lilo_engine.demo.server import LocalServer

BACKEND = "lilo_engine.commands.serve_backend"
SERVED_AGAIN_S = 60.0
"""A new backend has to import torch and read the model."""


def main() -> None:
    """One server for both halves."""
    proof = Proof("crash")
    with tiny_server() as server:
        with proof.part("kill -9 in mid-step"):
            kill_in_mid_step(proof, server)
        with proof.part("records deleted"):
            delete_records(proof, server)
    proof.end()


def backend_pid(server: LocalServer) -> int:
    """The process id of the server's backend."""
    for child in psutil.Process(server.pid).children(recursive=True):
        if BACKEND in " ".join(child.cmdline()):
            return child.pid
    raise LookupError(f"no child of the server runs {BACKEND}")


def kill_in_mid_step(proof: Proof, server: LocalServer) -> None:
    """Kill while a step that takes seconds is running; watch what two clients are told, and what is served after."""
    with connect(server) as service:
        busy = service.create_lora_training_client("tiny", rank=8, seed=1).result()
        idle = service.create_lora_training_client("tiny", rank=8, seed=2).result()
        step(idle, [datum(tokens(1, 20))])
        victim = backend_pid(server)
        before_s = psutil.Process(victim).cpu_times().user
        big = [datum(tokens(index, 1000)) for index in range(64)]
        ended: dict[str, Any] = {}

        def run() -> None:
            error, _ = outcome(lambda: busy.forward_backward(big, "cross_entropy"))
            ended.update(error=error, at=time.perf_counter())

        thread = threading.Thread(target=run)
        thread.start()
        _until(lambda: psutil.Process(victim).cpu_times().user > before_s + 0.3, 20.0)
        killed = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        thread.join(LIMIT_S)
        error = ended.get("error")
        proof.at_most("seconds from the kill to the error", ended.get("at", 1e9) - killed, 5.0)
        named = error is not None and "backend" in error.lower()
        proof.figure("the error names the cause", error, "names the backend", named)
        error, seconds = outcome(lambda: idle.forward([datum(tokens(1, 20))], "cross_entropy"))
        proof.figure("the other model's next call", error, "an error", error is not None)
        proof.at_most("seconds until the other model's error", seconds, 5.0)
        started = time.perf_counter()
        fresh = service.create_lora_training_client("tiny", rank=8, seed=3).result()
        loss = step(fresh, [datum(tokens(1, 20))])
        proof.at_most(
            "seconds until a new model is served", time.perf_counter() - started, SERVED_AGAIN_S
        )
        proof.figure("loss of the new model", loss, "> 0", loss > 0)
        proof.figure(
            "a new backend runs",
            backend_pid(server),
            f"not {victim}",
            backend_pid(server) != victim,
        )


def delete_records(proof: Proof, server: LocalServer) -> None:
    """Save, stop, delete the records file, start: the checkpoint is listed and loads."""
    data = [datum(tokens(index, 30)) for index in range(4)]
    with connect(server) as service:
        client = service.create_lora_training_client("tiny", rank=8, seed=4).result()
        step(client, data)
        path = client.save_state("kept").result().path
        adapter = client.save_weights_for_sampler("kept-too").result().path
        wanted = logprobs(client, data)
    server.stop()
    removed = [file.name for file in server.data_dir.glob("records.sqlite3*")]
    for name in removed:
        (server.data_dir / name).unlink()
    proof.figure(
        "records deleted", removed, "records.sqlite3 was there", "records.sqlite3" in removed
    )
    server.start()
    with connect(server) as service:
        listed = _rest(server).list_user_checkpoints().result().checkpoints
        paths = [checkpoint.tinker_path for checkpoint in listed]
        proof.figure("training state listed again", paths, f"has {path}", path in paths)
        proof.figure("sampler weights listed again", paths, f"has {adapter}", adapter in paths)
        restored = service.create_training_client_from_state_with_optimizer(path).result()
        worst = largest_difference(wanted, logprobs(restored, data))
        proof.at_most("max |logprob difference| after loading", worst, 1e-6)
        sampler = service.create_sampling_client(model_path=adapter)
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        error, _ = outcome(lambda: sampler.compute_logprobs(data[0].model_input))
        proof.figure("sampler weights load again", error, "no error", error is None)


def _rest(server: LocalServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.base_url, api_key=server.api_key)


def _until(true: Any, limit_s: float) -> None:
    """Look every 10 ms, at most `limit_s`: another process's CPU time cannot be waited for otherwise."""
    end = time.perf_counter() + limit_s
    while not true():
        if time.perf_counter() > end:
            raise TimeoutError(f"the backend did not begin within {limit_s:g} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
