#!/usr/bin/env python3
"""Runs the cases beside this file on the GPUs of this machine, and prints one short table: what `make prove-gpu` does.

    python benchmarks/gpu/run.py [--only slice peers ...] [--out FOLDER] [--limit SECONDS]

A case is a process of its own, so that memory and failures stay its own; with two GPUs two of them run at a time, and
those that need both come last. Every line of every case goes to FOLDER/lines.jsonl, what they logged to FOLDER/logs.txt.
The exit code is not 0 if a bound does not hold or a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from lilo_miles_backend.bench.random_model import roomy

from benchmarks.gpu.bounds import across_cases
from benchmarks.gpu.table import bounds_table, figures_table

ROOT = Path(__file__).resolve().parent.parent.parent


SHORTEST_S = 15.0
"""With less time left, no case is begun."""


@dataclass(frozen=True)
class Case:
    """One process."""

    module: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 150.0
    gpus: int = 1
    small: tuple[str, ...] = ()
    """What makes it small enough for a CPU, where it only shows that it runs."""

    @property
    def name(self) -> str:
        """For logs."""
        return " ".join((self.module, *self.arguments))


_SMALL = ("--model", "small", "--layers", "2")
CASES = (
    Case("slice", small=(*_SMALL, "--lengths", "64", "128")),
    Case("hybrid", limit_s=400.0, small=("--model", "small-hybrid", "--lengths", "256")),
    Case("peers", ("--liger",), limit_s=100.0),
    Case("peers", limit_s=100.0, small=(*_SMALL, "--lengths", "64", "128")),
    Case("serve", limit_s=240.0, small=("--model", "small", "--tokens", "256", "--steps", "4")),
    Case("whole", limit_s=200.0, small=("small:128",)),
    Case("breakdown", limit_s=90.0),
    Case("adapters", limit_s=120.0, small=(*_SMALL, "--tokens", "256")),
    Case("adapter_launches", limit_s=120.0),
    Case("check_attention", limit_s=90.0),
    Case("check_kernels", limit_s=90.0),
    Case("check_loss", limit_s=90.0),
    Case("check_passes", limit_s=120.0),
    Case("check_delta", limit_s=120.0),
    Case("delta_kernels", limit_s=240.0),
    Case("check_sampler", limit_s=120.0),
    Case(
        "sampler",
        limit_s=300.0,
        small=("--model", "small", "--tokens", "8", "--long", "64", "--rounds", "1"),
    ),
    Case("offload", limit_s=100.0, small=(*_SMALL, "--lengths", "64", "128")),
    Case("step_exactness", limit_s=120.0, small=(*_SMALL, "--tokens", "128")),
    Case("two", limit_s=240.0, gpus=2, small=(*_SMALL, "--runs", "tp:64", "cp:64")),
)


@dataclass
class Record:
    """What all cases said, in a folder; used by one thread per GPU."""

    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def line(self, line: dict[str, Any]) -> None:
        """Keep one line, on disk at once."""
        with self.lock:
            self.lines.append(line)
            with (self.folder / "lines.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def log(self, name: str, text: str) -> None:
        """Keep what a case wrote besides."""
        with self.lock, (self.folder / "logs.txt").open("a", encoding="utf-8") as file:
            file.write(f"===== {name}\n{text[-200_000:]}\n")


class Run:
    """One case's process, which has begun to import and waits."""

    def __init__(self, case: Case, devices: Sequence[int], device: str) -> None:
        self.case = case
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - lives with it
        command = [sys.executable, "-m", "benchmarks.gpu.worker", case.module, *case.arguments]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        else:
            command += ["--device", device, *case.small]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def finish(self, record: Record, limit_s: float) -> None:
        """Let it run to its end or its limit, and keep what it says."""
        started = time.monotonic()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self.kill)
        timer.start()
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.close()
            for line in self._process.stdout:
                self._take(line, record)
            code = self._process.wait()
        except BrokenPipeError:
            code = self._process.wait()
        timer.cancel()
        seconds = time.monotonic() - started
        if code:
            why = f"over its {limit_s:.0f} s" if seconds >= limit_s else f"exit code {code}"
            record.line(
                {"case": self.case.module, "figure": f"{self.case.name} ends well", "measured": why}
                | {"required": "exit code 0", "pass": False}
            )
        self._log.seek(0)
        record.log(f"{self.case.name} ({seconds:.0f} s)", self._log.read())
        print(f"{self.case.name}: {seconds:.0f} s, exit code {code}", flush=True)

    def kill(self) -> None:
        """With everything it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)

    def _take(self, line: str, record: Record) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            record.line(found)
        else:
            self._log.write(line)


def main() -> int:
    """Run, print, say whether all of it held."""
    parser = argparse.ArgumentParser(description="Run the GPU benchmarks.")
    parser.add_argument("--only", nargs="*", help="modules of cases; default: all")
    parser.add_argument(
        "--case", action="append", help="only this, with its arguments: 'two --runs tp:16384'"
    )
    parser.add_argument("--out", type=Path, help="where the lines go; default: a new folder")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all of it")
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.0,
        help="of these, seconds for the cases of several GPUs: whatever runs then is cut off",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    number = 2 if on_cpu else gpus()  # processes stand for GPUs there
    if not number:
        print("there is no CUDA device here, so nothing of this can be measured", file=sys.stderr)
        return 2
    wanted = chosen(arguments.only, arguments.case or (), on_cpu=on_cpu)
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="lilo-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder)
    models = tempfile.mkdtemp(prefix="lilo-models-", dir=roomy())
    os.environ.setdefault("LILO_BENCH_MODELS", models)
    try:
        ends = time.monotonic() + arguments.limit
        run_all(wanted, number, record, arguments.device, (ends - arguments.reserve, ends))
    finally:
        shutil.rmtree(models, ignore_errors=True)
    for line in [] if on_cpu else across_cases(record.lines):
        record.line(line)
    figures = figures_table(record.lines)
    (folder / "table.txt").write_text(f"{figures}\n{bounds_table(record.lines)}", "utf-8")
    print(f"{figures}\n{bounds_table(record.lines, short=True)}\nall of it: {folder}")
    return 1 if any(line.get("pass") is False for line in record.lines) else 0


def chosen(only: Sequence[str] | None, given: Sequence[str], *, on_cpu: bool) -> list[Case]:
    """All cases, those of some modules, or just those that are given with arguments of their own."""
    if given:
        by_module = {case.module: case for case in CASES}
        split = [shlex.split(text) for text in given]
        return [replace(by_module[name], arguments=tuple(more)) for name, *more in split]
    return [
        case
        for case in CASES
        if (only is None or case.module in only) and (case.small or not on_cpu)
    ]


def gpus() -> int:
    """How many CUDA devices there are, asked in another process so that this one uses none."""
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(found.stdout)


def run_all(
    cases: Sequence[Case], number: int, record: Record, device: str, ends: tuple[float, float]
) -> None:
    """Cases of one GPU on whichever is free, until the first end; then those of several, until the second."""
    together = [case for case in cases if 1 < case.gpus <= number]
    waiting = deque(case for case in cases if case.gpus == 1)
    first = ends[0] if together else ends[1]
    # In this order, whichever thread is faster: the first ones run at once, the next ones import meanwhile.
    begun: list[list[Run]] = [[] for _ in range(number)]
    for _ in range(2):
        for index, runs in enumerate(begun):
            if waiting:
                runs.append(Run(waiting.popleft(), [index], device))
    threads = [
        threading.Thread(target=_serve, args=(runs, waiting, [index], record, device, first))
        for index, runs in enumerate(begun)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _serve([], deque(together), list(range(number)), record, device, ends[1])
    for case in cases:
        if case.gpus > number:
            record.line({"case": case.module, "setting": f"not run: needs {case.gpus} GPUs"})


def _serve(
    begun: list[Run],
    waiting: deque[Case],
    devices: list[int],
    record: Record,
    device: str,
    ends: float,
) -> None:
    """One case after another; the next one imports meanwhile."""
    while begun or waiting:
        run = begun.pop(0) if begun else Run(waiting.popleft(), devices, device)
        if waiting and not begun:
            begun.append(Run(waiting.popleft(), devices, device))
        left = ends - time.monotonic()
        if left < SHORTEST_S:
            run.kill()
            record.line({"case": run.case.module, "setting": "not run: the time was up"})
            continue
        run.finish(record, min(run.case.limit_s, left))


if __name__ == "__main__":
    sys.exit(main())
