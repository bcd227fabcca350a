"""Section core: steps of forward_backward and optim_step on the full batch, pipelined and awaited."""

from __future__ import annotations

import time
from typing import Any

from load.context import Load
from load.measure import difference, summary, tree_cpu


def run(load: Load) -> dict[str, Any]:
    """Measure."""
    settings = load.settings
    report: dict[str, Any] = {}
    started = time.perf_counter()
    client = load.main
    report["create_client_s"] = round(time.perf_counter() - started, 3)
    data = load.batch()
    started = time.perf_counter()
    load.steps(client, data, 1)
    report["first_step_s"] = round(time.perf_counter() - started, 3)
    load.steps(client, data, 2)
    for name in ("pipelined", "awaited"):
        cpu = tree_cpu(settings.server_pid)
        started = time.perf_counter()
        step = load.steps(client, data, settings.steps, pipelined=name == "pipelined")
        wall_s = time.perf_counter() - started
        part = report[name] = {
            "steps_per_s": round(settings.steps / wall_s, 3),
            "tokens_per_s": round(settings.steps * settings.batch * settings.seq / wall_s, 1),
            "step": summary(step.whole),
        }
        if step.forward_backward:
            part["forward_backward"] = summary(step.forward_backward)
            part["optim_step"] = summary(step.optim_step)
        used = difference(tree_cpu(settings.server_pid), cpu)
        if used is not None:
            part["server_cpu_s_per_step"] = round(used / settings.steps, 4)
    count = max(1, min(10, settings.steps))
    started = time.perf_counter()
    for _ in range(count):
        load.wait(client.forward(data, "cross_entropy"))
    report["forward_only_ms"] = round(1e3 * (time.perf_counter() - started) / count, 2)
    return report
