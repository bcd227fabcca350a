"""Serve: `lilo serve` and the public SDK on one GPU, beside the bare trainer on the same model, data and clock.

Steps are sent one ahead of the answers, as a training loop that wants no gaps does. Training states are saved in the middle of
the timed steps, so that what a save costs them is in the time; that all saves end well is waited for afterwards. Sampler
weights are saved at the end, and a sample drawn from them. The bare trainer is called step after step, as the server's own
process would call it, with the same datums; it saves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tinker
from lilo_definitions import Definition
from lilo_engine.demo.server import LocalServer
from lilo_engine.operations.datum import Datum
from lilo_miles_backend.bench.clock import synchronize
from lilo_miles_backend.bench.native import (
    ADAM,
    LORA_RANK,
    Layout,
    Trainer,
    definition,
    random_datums,
)
from tinker import types

from benchmarks.gpu.lines import at_most, bound, emit, part
from benchmarks.gpu.models import model_folder

CASE = "serve"
OVERHEAD = 0.03
START_S, LIMIT_S = 180.0, 120.0
STALL_S = 5.0
SAVED = (0.25, 0.75)
"""After these shares of the steps."""
ROWS = 4


def main() -> None:
    """The server first, then the bare trainer: memory of one model at a time, beside the sampler's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--tokens", type=int, default=16_384, help="of one step")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    folder, architecture = model_folder(arguments.model)
    length = arguments.tokens // ROWS
    what = definition(folder, architecture, arguments.tokens, Layout(device=arguments.device))
    datums = random_datums([length] * ROWS, architecture.vocab)
    served: dict[str, float] = {}
    with part(CASE, "20 steps through the SDK"):
        served = through_the_sdk(what, datums, arguments.steps)
    with part(CASE, "the bare trainer"):
        bare = bare_steps(what, datums, arguments.steps)
        emit(CASE, setting="bare trainer", tokens=arguments.tokens, tok_s=arguments.tokens / bare)
        for name, seconds in served.items():
            emit(CASE, setting=f"SDK, {name}", tok_s=arguments.tokens / seconds, step_s=seconds)
        if served:
            over = served["with saves"] / bare - 1
            at_most(CASE, "server over the bare trainer, with saves", over, OVERHEAD)


def through_the_sdk(what: Definition, datums: list[Datum], steps: int) -> dict[str, float]:
    """Seconds a step, without and with saves."""
    with tempfile.TemporaryDirectory(prefix="lilo-serve-") as folder:
        path = Path(folder) / f"{what.name}.yaml"
        path.write_text(json.dumps(what.model_dump(mode="json")), "utf-8")
        server = LocalServer(str(path), Path(folder) / "data")
        started = time.perf_counter()
        try:
            server.start(START_S)
            emit(
                CASE, setting="start of the server", seconds_to_ready=time.perf_counter() - started
            )
            return drive(server, what, datums, steps)
        finally:
            for log in sorted((Path(folder) / "data" / "logs").glob("*.log")):
                _show(log)
            server.stop()


def drive(
    server: LocalServer, what: Definition, datums: list[Datum], steps: int
) -> dict[str, float]:
    """Train, save, sample."""
    service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
    client = service.create_lora_training_client(
        base_model=what.model.name, rank=LORA_RANK, seed=0, train_unembed=False
    )
    data = [_datum(one) for one in datums]
    seconds: dict[str, float] = {}
    saves: list[Any] = []
    answered = [time.perf_counter()]
    _steps(client, data, 3, (), saves, answered)
    for name, shares in (("without saves", ()), ("with saves", SAVED)):
        started = time.perf_counter()
        losses = _steps(
            client, data, steps, [int(share * steps) for share in shares], saves, answered
        )
        seconds[name] = (time.perf_counter() - started) / steps
        gaps = sorted(after - before for before, after in pairwise(answered[-steps:]))
        emit(
            CASE,
            setting=f"{name}: median and longest waits",
            waits_s=[gaps[len(gaps) // 2], *gaps[-4:]],
        )
    waits = [after - before for before, after in pairwise(answered)]
    at_most(CASE, "longest wait for a step after the server was ready, s", max(waits), STALL_S)
    emit(CASE, setting="training states saved", paths=[save.result(LIMIT_S).path for save in saves])
    bound(CASE, "the loss falls", losses[-1], f"< {losses[0]:.4g}", losses[-1] < losses[0])
    started = time.perf_counter()
    sampler = client.save_weights_and_get_sampling_client(name="last")
    prompt = types.ModelInput.from_ints(datums[0].tokens.numpy()[:64].tolist())
    parameters = types.SamplingParams(max_tokens=16, temperature=1.0, seed=1)
    answer = sampler.sample(prompt=prompt, num_samples=2, sampling_params=parameters)
    drawn = [len(one.tokens) for one in answer.result(timeout=LIMIT_S).sequences]
    bound(CASE, "tokens sampled from the trained weights", drawn, "[16, 16]", drawn == [16, 16])
    emit(CASE, setting="saved, loaded and sampled", after_s=time.perf_counter() - started)
    return seconds


def _steps(
    client: tinker.TrainingClient,
    data: list[types.Datum],
    steps: int,
    saved_after: Sequence[int],
    saves: list[Any],
    answered: list[float],
) -> list[float]:
    """Submit each step while the one before it runs; the losses. Returns when every step is answered."""
    adam = types.AdamParams(learning_rate=ADAM.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
    losses: list[float] = []
    waiting: deque[Any] = deque()
    for index in range(steps):
        waiting.append((client.forward_backward(data, "cross_entropy"), client.optim_step(adam)))
        if index + 1 in saved_after:
            saves.append(client.save_state(f"step-{index + 1}"))
        if len(waiting) > 1:
            losses.append(_settle(waiting.popleft()))
            answered.append(time.perf_counter())
    for pair in waiting:
        losses.append(_settle(pair))
        answered.append(time.perf_counter())
    return losses


def _settle(pair: Any) -> float:
    passed, stepped = (future.result(timeout=LIMIT_S) for future in pair)
    del stepped
    return passed.metrics["loss:sum"]


def _datum(datum: Datum) -> types.Datum:
    targets, weights = (datum.loss_inputs[name].numpy() for name in ("target_tokens", "weights"))
    inputs = {
        "target_tokens": types.TensorData(data=targets.tolist(), dtype="int64"),
        "weights": types.TensorData(data=weights.tolist(), dtype="float32"),
    }
    tokens = types.ModelInput.from_ints(datum.tokens.numpy().tolist())
    return types.Datum(model_input=tokens, loss_fn_inputs=inputs)


def bare_steps(what: Definition, datums: list[Datum], steps: int) -> float:
    """Seconds a step of the same data in this process, nothing else on the device."""
    with Trainer(what) as trainer:
        data = {trainer.models[0]: datums}
        for _ in range(3):
            trainer.step(data)
        synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            trainer.step(data)
        synchronize()
        return (time.perf_counter() - started) / steps


def _show(log: Path) -> None:
    text = log.read_text("utf-8", errors="replace")
    os.write(2, f"--- {log.name}\n{text[-20_000:]}\n".encode())


if __name__ == "__main__":
    main()
