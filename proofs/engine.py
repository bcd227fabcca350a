"""Engine: what it costs with a trainer that computes nothing, how flat that is, and how fairly it shares (a few minutes)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from _proof import Proof
from lilo_definitions import get
from lilo_engine.bench.run import run
from lilo_engine.bench.sections import LONG_REQUESTS
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.commands.discovery import find_backend
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.tensor import Tensor
from lilo_engine.simulate.simulation import Simulation
from lilo_engine.simulate.workload import Workload

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"
LOAD_SECTIONS = "core,overhead,sample,clients"
ADAM = AdamParams(
    learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
)


def main() -> None:
    """Measure; `--quick` leaves out what takes minutes (the load driver, 10,000 clients)."""
    quick = "--quick" in sys.argv[1:]
    proof = Proof("engine")
    with proof.part("null backend"):
        _null(proof)
    with proof.part("simulation"):
        _simulated(proof, 1000, 65536)
        if not quick:
            _simulated(proof, 10000, 16384)
    if not quick:
        with proof.part("load driver against the bare trainer"):
            _load(proof)
    proof.end()


def _null(proof: Proof) -> None:
    report = run()
    long, ratios = report["long_requests"], report["ratios"]
    scheduling = report["scheduling"]
    proof.at_most("scheduling pass, 512 parked calls of 76 KB, ms", scheduling["512"]["p50_ms"], 2)
    proof.at_most(
        "heartbeat, 2,048 waiting futures, p50 ms", report["waiters"]["2048"]["p50_ms"], 5
    )
    proof.at_most("a 250k-token request, ms", long["alone"]["p50_ms"], 100)
    proof.at_most(
        "a 250k-token request, peak memory by its bytes", long["alone_peak_by_request_bytes"], 3
    )
    proof.equal("250k-token requests answered", long["stream_requests"], LONG_REQUESTS)
    proof.figure("a stream of them, ms each", long["stream_ms_per_request"], "reported", True)
    proof.at_most("64 slots against 1, CPU of a step", ratios["slots_most_to_least"], 1.02)
    for section in ("parked", "waiters", "slots", "scheduling"):
        for case, row in report[section].items():
            if isinstance(row, dict):
                proof.figure(f"flat cost: {section} {case}", row, "reported", True)


def _simulated(proof: Proof, clients: int, work_tokens: int) -> None:
    started = time.perf_counter()
    workload = Workload(clients=clients, work_tokens=work_tokens)
    figures = Simulation(workload=workload, limits=get("tiny").limits).run().figures()
    took_s = time.perf_counter() - started
    name = f"{clients:,} simulated clients"
    if clients <= 1000:
        # With more clients each one's work is a few requests, and progress comes in lumps.
        proof.at_most(f"{name}, progress ratio", figures.progress_ratio or float("inf"), 1.25)
    proof.at_most(f"{name}, last end / first end", figures.last_end_s / figures.first_end_s, 1.1)
    proof.at_most(f"{name}, passed over", figures.bypass, figures.bypass_bound)
    proof.at_least(f"{name}, batch fill", figures.fill or 0.0, 0.95)
    proof.at_most(f"{name}, seconds to simulate", took_s, 60)


def _load(proof: Proof) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        subprocess.run(
            [sys.executable, str(BENCHMARK), "--out", str(out), "--only", LOAD_SECTIONS],
            stdout=sys.stderr,
            timeout=1200.0,
            check=False,
        )
        report = json.loads(out.read_text("utf-8"))
        bare = _bare_trainer(Path(folder))
    overhead, sample, clients = report["overhead"], report["sample"], report["clients"]
    proof.at_most("almost empty step, awaited, ms", overhead["awaited_step"]["p50_ms"], 30)
    proof.at_most("almost empty step, pipelined, ms", overhead["pipelined_step"]["p50_ms"], 20)
    proof.at_most("one-token sample, ms", sample["one_token_call"]["p50_ms"], 20)
    one = sample["one_request_num_samples"]["s_per_request"]
    proof.at_most("32 requests against one of 32", sample["many_requests"]["wall_s"] / one, 1.5)
    cpu_s = report["core"]["awaited"]["server_cpu_s_per_step"]
    proof.at_most("CPU of a step of 8 x 128 against the bare trainer's", cpu_s / bare["cpu_s"], 1.5)
    full, single = clients["8"], clients["1"]
    rate = full["full"]["tokens_per_s"] / bare["tokens_per_s"]
    proof.at_least("8 clients, full batch, against the bare trainer's tokens/s", rate, 0.90)
    empty = full["empty"]["steps_per_s"] / single["empty"]["steps_per_s"]
    proof.at_least("8 clients, almost empty batch, against one client", empty, 3)
    ends = full["full"]["last_end_s"] / full["full"]["first_end_s"]
    proof.at_most("8 clients, last end / first end", ends, 1.1)


def _bare_trainer(folder: Path) -> dict[str, float]:
    """Steps of 8 x 128 tokens on the backend alone, in this process."""
    config = BackendConfig(definition=get("tiny"), checkpoints_root=str(folder / "bare"), epoch=1)
    backend = find_backend("miles")(config)
    model_id = ModelId("bare")
    spec: dict[str, Any] = {"train_attn": True, "train_mlp": True, "train_unembed": True}
    backend.create_adapter(model_id, LoraSpec(lora_rank=8, alpha=32.0, seed=1, **spec))
    ids = [33 + i % 90 for i in range(128)]
    datum = Datum(
        tokens=Tensor.of(ids, "int32"),
        loss_inputs={
            "target_tokens": Tensor.of(ids, "int64"),
            "weights": Tensor.of([1.0] * len(ids), "float32"),
        },
    )
    item = WorkItem(operation_id="bare:1", model_id=model_id, datums=(datum,) * 8)
    batch = Batch(loss="cross_entropy", config={}, forward_only=False, items=(item,))

    def step() -> None:
        backend.forward_backward(batch)
        backend.optim_step(model_id, ADAM)

    for _ in range(3):
        step()
    cpu_s, wall_s = _best(step)
    backend.close()
    return {"cpu_s": cpu_s, "tokens_per_s": 8 * 128 / wall_s}


def _best(step: partial | Any, count: int = 15) -> tuple[float, float]:
    """Median processor and wall seconds."""
    cpu: list[float] = []
    wall: list[float] = []
    for _ in range(count):
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        step()
        cpu.append(time.process_time() - cpu_s)
        wall.append(time.perf_counter() - wall_s)
    return sorted(cpu)[count // 2], sorted(wall)[count // 2]


if __name__ == "__main__":
    main()
