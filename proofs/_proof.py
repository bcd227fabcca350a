"""What proofs share: printing a figure, a server of their own, data for it. Not a proof."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import tinker
from lilo_engine.demo.server import LocalServer
from tinker import types

LIMIT_S = 120.0
"""For one call of the SDK; a proof that hangs has failed."""


class Proof:
    """Collects figures; each is printed at once as one JSON object on a line of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failed = 0

    def figure(self, figure: str, measured: Any, required: str, good: bool) -> None:
        """Print one figure and remember whether it holds."""
        self.failed += not good
        line = {
            "proof": self.name,
            "figure": figure,
            "measured": measured,
            "required": required,
            "pass": bool(good),
        }
        print(json.dumps(line), flush=True)

    def at_most(self, figure: str, measured: float, limit: float) -> None:
        """The figure must not be above a limit."""
        self.figure(figure, measured, f"<= {limit:g}", measured <= limit)

    def at_least(self, figure: str, measured: float, limit: float) -> None:
        """The figure must not be below a limit."""
        self.figure(figure, measured, f">= {limit:g}", measured >= limit)

    def equal(self, figure: str, measured: Any, wanted: Any) -> None:
        """The figure must be exactly this."""
        self.figure(figure, measured, f"== {json.dumps(wanted)}", measured == wanted)

    @contextmanager
    def part(self, figure: str) -> Iterator[None]:
        """What raises inside is a failed figure; the proof goes on."""
        try:
            yield
        except Exception as error:  # the other figures still tell something
            self.figure(figure, f"{type(error).__name__}: {str(error)[:300]}", "no error", False)

    def end(self) -> NoReturn:
        """Exit: 0 only if every figure held."""
        sys.stdout.flush()
        sys.exit(1 if self.failed else 0)


@contextmanager
def tiny_server() -> Iterator[LocalServer]:
    """`lilo serve tiny` on a data folder of its own, removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="lilo-proof-") as folder,
        LocalServer("tiny", Path(folder)) as server,
    ):
        try:
            yield server
        finally:
            print((server.data_dir / "logs" / "server.log").read_text("utf-8"), file=sys.stderr)


def connect(server: LocalServer) -> tinker.ServiceClient:
    """The SDK's client for a server."""
    return tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)


def outcome(call: Callable[[], Any], limit_s: float = LIMIT_S) -> tuple[str | None, float]:
    """The error that `call` (and the future it may return) ended with, or None; and the seconds it took."""
    started = time.perf_counter()
    try:
        value = call()
        if callable(getattr(value, "result", None)):
            value.result(timeout=limit_s)
    except Exception as error:  # any error is an answer here
        return f"{type(error).__name__}: {error}", time.perf_counter() - started
    return None, time.perf_counter() - started


def medians_of(command: list[str], tries: int = 9) -> tuple[float, float]:
    """Median wall time and median processor time of a command, in seconds; a first run is not counted.

    The clock is what a person waits for; on a busy machine it holds the others' work too, which the second tells.
    """
    wall: list[float] = []
    busy: list[float] = []
    for _ in range(tries + 1):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        wall.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(median(wall[1:]), 3), median(busy[1:])


def tokens(seed: int, count: int) -> list[int]:
    """Printable byte tokens, the same for the same seed."""
    return [
        33 + (seed * 7919 + index * 104_729 + index * index * seed) % 90 for index in range(count)
    ]


def datum(ids: list[int], **columns: list[float]) -> types.Datum:
    """Predict each token from those before it, with the loss's own inputs; weights of 1 if there are none."""
    columns = columns or {"weights": [1.0] * (len(ids) - 1)}
    inputs = {name: types.TensorData(data=data, dtype="float32") for name, data in columns.items()}
    inputs["target_tokens"] = types.TensorData(data=ids[1:], dtype="int64")
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def adam(learning_rate: float = 1e-2) -> types.AdamParams:
    """AdamW parameters under which one step is seen clearly."""
    return types.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)


def logprobs(client: tinker.TrainingClient, data: list[types.Datum]) -> list[list[float]]:
    """Per datum and token, from a forward pass."""
    output = client.forward(data, "cross_entropy").result(timeout=LIMIT_S)
    return [record["logprobs"].tolist() for record in output.loss_fn_outputs]


def step(client: tinker.TrainingClient, data: list[types.Datum]) -> float:
    """One awaited step; the loss before it."""
    output = client.forward_backward(data, "cross_entropy").result(timeout=LIMIT_S)
    client.optim_step(adam()).result(timeout=LIMIT_S)
    return output.metrics["loss:sum"]


def largest_difference(left: list[list[float]], right: list[list[float]]) -> float:
    """The largest |a - b|; infinite if the shapes differ, or one is no number."""
    if [len(row) for row in left] != [len(row) for row in right]:
        return float("inf")
    off = [abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return float("inf") if any(map(math.isnan, off)) else max(off)
