"""Section overhead: what a call costs when there is almost nothing to compute (1 datum of 2 tokens)."""

from __future__ import annotations

import time
from typing import Any

from load.context import Load
from load.measure import difference, summary, tree_cpu

IDLE_S = 3.0
"""How long an idle server is watched."""


def run(load: Load) -> dict[str, Any]:
    """Measure."""
    count = load.settings.steps
    client = load.main
    data = [load.datum(2, seed=1)]
    load.steps(client, data, 2)
    awaited = load.steps(client, data, count, pipelined=False)
    report: dict[str, Any] = {
        "awaited_step": summary(awaited.whole),
        "forward_backward": summary(awaited.forward_backward),
        "optim_step": summary(awaited.optim_step),
        "pipelined_step": summary(load.steps(client, data, count).whole),
    }
    # A deep queue: everything is sent before anything is waited for.
    started = time.perf_counter()
    futures: list[Any] = []
    for _ in range(count):
        futures += [client.forward_backward(data, "cross_entropy"), client.optim_step(load.adam())]
    for future in futures:
        load.wait(future)
    report["deep_queue_ms_per_step"] = round(1e3 * (time.perf_counter() - started) / count, 2)
    cpu = tree_cpu(load.settings.server_pid)
    time.sleep(IDLE_S)
    used = difference(tree_cpu(load.settings.server_pid), cpu)
    if used is not None:
        report["idle_cpu_pct"] = round(100 * used / IDLE_S, 1)
    return report
