"""Engine: what it costs with a trainer that computes nothing, how flat that is, and how fairly it shares (a few minutes)."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from _bare import LONG_ROWS, SHORT_ROWS, bare_trainer, crowd, full_batch, overhead
from _proof import LIMIT_S, Proof, tiny_server
from _samples import samples
from lilo_definitions import get
from lilo_engine.bench.client import datums
from lilo_engine.bench.run import run
from lilo_engine.bench.sections import LONG_REQUESTS
from lilo_engine.bench.sections import steps as steps_of
from lilo_engine.bench.wire import Wire
from lilo_engine.bench.wire_model import WireModel
from lilo_engine.demo.server import LocalServer
from lilo_engine.simulate.simulation import Simulation
from lilo_engine.simulate.workload import Workload

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"
STOPPED_CLIENTS = 8
LOAD_SECTIONS = "core,overhead,sample,clients"


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
        with proof.part("a real server, by clients without weight"):
            _served(proof)
        with proof.part("a server that packs models, by clients without weight"):
            _packed(proof)
        with proof.part("a server that stops"):
            _stopped(proof)
        with proof.part("load driver against the bare trainer"):
            _load(proof)
        with proof.part("eight SDK clients against the bare trainer"):
            _crowd(proof)
    proof.end()


def _stopped(proof: Proof) -> None:
    """SIGTERM while eight clients train: an orderly end, soon."""
    over = threading.Event()

    def train(server: LocalServer) -> None:
        # The server ends in the middle of a step.
        with suppress(OSError, RuntimeError), Wire(server.base_url, server.api_key) as wire:
            model = WireModel.create(wire)
            while not over.is_set():
                model.step(data)
                steps.append(1)

    data, steps = datums(8, 128), list[int]()
    with tiny_server() as server, ThreadPoolExecutor(STOPPED_CLIENTS) as pool:
        for _ in range(STOPPED_CLIENTS):
            pool.submit(train, server)
        deadline = time.monotonic() + LIMIT_S
        while len(steps) < 4 * STOPPED_CLIENTS and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        code = server.stop()
        took_s = time.monotonic() - began
        over.set()
    proof.at_least("steps before SIGTERM", len(steps), 4 * STOPPED_CLIENTS)
    proof.equal("exit code after SIGTERM with 8 busy clients", code, 0)
    proof.at_most("SIGTERM with 8 busy clients, s", took_s, 15)


def _null(proof: Proof) -> None:
    report = run()
    long, ratios = report["long_requests"], report["ratios"]
    scheduling = report["scheduling"]
    proof.at_most("scheduling pass, 512 parked calls of 76 KB, ms", scheduling["512"]["p50_ms"], 2)
    proof.at_most(
        "heartbeat, 2,048 waiting futures, p50 ms", report["waiters"]["2048"]["p50_ms"], 5
    )
    for section, case in (("parked", "512"), ("waiters", "2048")):
        slow_ms = report[section][case]["p99_ms"]
        proof.at_most(f"heartbeat, {section} {case}, p99 ms", slow_ms, 250)
    proof.at_most("a 250k-token request, ms", long["alone"]["p50_ms"], 100)
    proof.at_most(
        "a 250k-token request, peak memory by its bytes", long["alone_peak_by_request_bytes"], 3
    )
    proof.equal("250k-token requests answered", long["stream_requests"], LONG_REQUESTS)
    proof.figure("a stream of them, ms each", long["stream_ms_per_request"], "reported", True)
    proof.at_most("64 slots against 1, CPU of a step", ratios["slots_most_to_least"], 1.02)
    # One client waits for every hop, eight overlap theirs until a core is full.
    name = "8 clients against one, almost empty steps, a trainer that computes nothing"
    proof.figure(name, ratios["eight_clients_to_one"], "reported", True)
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


def _packed(proof: Proof) -> None:
    """Almost empty steps of several models in one forward and backward, as `trainer.pack_models` allows."""
    with tempfile.TemporaryDirectory() as folder:
        definition = Path(folder) / "packed.yaml"
        definition.write_text("extends: tiny\ntrainer: {pack_models: true}\n", "utf-8")
        with LocalServer(str(definition), Path(folder) / "data") as server:
            told = steps_of(server.base_url, server.pid, server.api_key)
    ratio = told["eight_clients_against_one"]
    proof.at_least("8 clients, almost empty batch, packed, against one client", ratio, 3)
    proof.figure("the same, all figures", told, "reported", True)


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
        with bare_trainer(Path(folder)) as trainer:
            bare = full_batch(trainer)
    overhead, sample, clients = report["overhead"], report["sample"], report["clients"]
    proof.at_most("almost empty step, awaited, ms", overhead["awaited_step"]["p50_ms"], 30)
    proof.at_most("almost empty step, pipelined, ms", overhead["pipelined_step"]["p50_ms"], 20)
    proof.at_most("one-token sample, ms", sample["one_token_call"]["p50_ms"], 20)
    one, many = sample["one_request_num_samples"]["s_per_request"], sample["many_requests"]
    # The SDK alone takes about 2.7 ms of a processor for each request.
    figure = {"ratio": many["wall_s"] / one, "driver_cpu_s": sample["driver_cpu_s"]}
    proof.figure("32 requests against one of 32, with the SDK's own time", figure, "reported", True)
    cpu_s = report["core"]["awaited"]["server_cpu_s_per_step"]
    proof.at_most("CPU of a step of 8 x 128 against the bare trainer's", cpu_s / bare.cpu_s, 1.5)
    full, single = clients["8"], clients["1"]
    # Minutes after the clients, on a machine whose speed drifts: `_crowd` compares in turns.
    rate = full["full"]["tokens_per_s"] * bare.wall_s / (8 * 128)
    name = "8 clients, full batch, against the bare trainer's tokens/s, measured minutes apart"
    proof.figure(name, rate, "reported", True)
    empty = full["empty"]["steps_per_s"] / single["empty"]["steps_per_s"]
    name = "8 clients, almost empty batch, against one client, with the SDK's own time"
    proof.figure(name, empty, "reported", True)
    ends = full["full"]["last_end_s"] / full["full"]["first_end_s"]
    proof.at_most("8 clients, last end / first end", ends, 1.1)


def _crowd(proof: Proof) -> None:
    """A server whose trainer is busy all the time, and the same trainer without one, in turns."""
    with tempfile.TemporaryDirectory() as folder, tiny_server() as server:
        ratios = crowd(server, Path(folder))
    rate = statistics.median(ratios)
    proof.at_least("8 clients, full batch, against the bare trainer's tokens/s", rate, 0.90)
    proof.figure("the same, turn by turn", ratios, "reported", True)


def _served(proof: Proof) -> None:
    """What is the server's: clients that take next to no time of their own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        bare_trainer(Path(folder)) as bare,
        tiny_server() as server,
    ):
        asked = samples(server.base_url, server.pid, server.api_key)
        proof.at_most("32 requests against one of 32", asked["many_to_one"], 1.5)
        proof.figure("the same, all figures", asked, "reported", True)
        told = steps_of(server.base_url, server.pid, server.api_key)
        # Bit for bit as if each were alone, so that the trainer runs one after another.
        proof.figure("almost empty steps, all figures", told, "reported", True)
        long = overhead(bare, server, LONG_ROWS)
        proof.at_least("a long step on the bare trainer, s", long.bare.wall_s, 1.0)
        proof.at_most("what the engine adds to it, share of the time", long.wall_share, 0.03)
        proof.at_most("CPU of front and engine, share of the trainer's", long.cpu_share, 0.03)
        short = overhead(bare, server, SHORT_ROWS)
        shares = {"time": short.wall_share, "bare_s": short.bare.wall_s}
        proof.figure("the same with rows of 128 tokens, time", shares, "reported", True)
        proof.at_most("the same with rows of 128 tokens, CPU", short.cpu_share, 0.03)


if __name__ == "__main__":
    main()
