"""Section clients: several clients at once, each with its own adapter, on the full and on an almost empty batch."""

from __future__ import annotations

import threading
import time
from typing import Any

import tinker
from tinker import types

from load.context import Load, Step, log
from load.measure import difference, summary, tree_cpu, tree_memory


def run(load: Load) -> dict[str, Any]:
    """Measure each count of the settings; stop at the first that cannot be had."""
    settings = load.settings
    report: dict[str, Any] = {}
    pool = [load.main, *([load.restored] if load.restored is not None else [])]
    for count in map(int, settings.clients.split(",")):
        made: list[float] = []
        try:
            while len(pool) < count:
                started = time.perf_counter()
                pool.append(load.client())
                made.append(time.perf_counter() - started)
        except tinker.TinkerError as error:
            words = f"create client {len(pool) + 1}: {type(error).__name__}: {str(error)[:200]}"
            report[str(count)] = {"error": words}
            break
        one: dict[str, Any] = {"create_client": summary(made)}
        for name, batch, seq in (("full", settings.batch, settings.seq), ("empty", 1, 2)):
            one[name] = _measure(load, pool[:count], batch, seq)
            log("clients", count, name, one[name]["steps_per_s"], "steps/s")
        one["mem"] = tree_memory(settings.server_pid)
        report[str(count)] = one
    return report


def _measure(
    load: Load, clients: list[tinker.TrainingClient], batch: int, seq: int
) -> dict[str, Any]:
    settings, count = load.settings, len(clients)
    data = [
        [load.datum(seq, seed=1000 * client + index) for index in range(batch)]
        for client in range(count)
    ]
    _together(load, clients, data, settings.client_warmup)  # shapes compile once
    cpu = tree_cpu(settings.server_pid)
    wall_s, steps, ends = _together(load, clients, data, settings.client_steps)
    done = count * settings.client_steps
    report: dict[str, Any] = {
        "steps_per_s": round(done / wall_s, 3),
        "tokens_per_s": round(done * batch * seq / wall_s, 1),
        "step": summary([second for step in steps for second in step.whole]),
        # Fairness: how far the slowest client's end lies behind the fastest's.
        "first_end_s": round(min(ends), 3),
        "last_end_s": round(max(ends), 3),
    }
    used = difference(tree_cpu(settings.server_pid), cpu)
    if used is not None:
        report["server_cpu_s_per_step"] = round(used / done, 4)
    return report


def _together(
    load: Load,
    clients: list[tinker.TrainingClient],
    data: list[list[types.Datum]],
    count: int,
) -> tuple[float, list[Step], list[float]]:
    """Run `count` steps of every client, all started at one moment."""
    steps: list[Step] = [Step() for _ in clients]
    ends = [0.0] * len(clients)
    errors: list[Exception] = []
    gate = threading.Barrier(len(clients) + 1)

    def go(index: int) -> None:
        gate.wait()
        started = time.perf_counter()
        try:
            steps[index] = load.steps(clients[index], data[index], count)
        except Exception as error:  # raised again below, in the section's own thread
            errors.append(error)
        ends[index] = time.perf_counter() - started

    threads = [threading.Thread(target=go, args=(index,)) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    gate.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - started, steps, ends
