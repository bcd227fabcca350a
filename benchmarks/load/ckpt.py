"""Section ckpt: save training state, save for the sampler, load into a new client."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from load.context import Load, largest_difference
from load.measure import summary


def run(load: Load) -> dict[str, Any]:
    """Measure."""
    client = load.main
    tag = str(int(time.time()))
    paths: list[str] = []

    def three_times(save: Callable[[str], Any], prefix: str) -> dict[str, float]:
        times: list[float] = []
        for index in range(3):
            started = time.perf_counter()
            paths.append(load.wait(save(f"{prefix}{tag}{index}")).path)
            times.append(time.perf_counter() - started)
        return summary(times)

    report: dict[str, Any] = {
        "save_weights_for_sampler": three_times(client.save_weights_for_sampler, "sw"),
        "save_state": three_times(client.save_state, "ck"),
    }
    started = time.perf_counter()
    load.restored = load.restore(paths[-1])
    report["restore_into_new_client_s"] = round(time.perf_counter() - started, 3)
    data = [load.datum(load.settings.seq, seed=3)]
    report["restored_logprob_max_abs_diff"] = largest_difference(
        load.logprobs(client, data), load.logprobs(load.restored, data)
    )
    return report
