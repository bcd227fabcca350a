#!/usr/bin/env python3
"""Load and correctness driver for any server that speaks the Tinker API.

It uses the public `tinker` SDK alone, so the same command measures another server and ours:

    python tinker_load.py --base-url http://127.0.0.1:8010 --base-model tiny --server-pid PID --out result.json
    python tinker_load.py --make-model DIR      # tiny random Qwen3 and byte tokenizer, for servers that want a folder

Sections (choose with --only a,b,...):
  core      steps of forward_backward and optim_step on 8 x 128 tokens, pipelined and awaited
  overhead  time per call with an almost empty batch (1 datum, 2 tokens)
  sample    32 sequences of 64 tokens, as one request and as 32 requests
  ckpt      save_state, load into a new client, save_weights_for_sampler
  clients   1, 2, 4 and 8 clients at once, same batch and almost empty batch
  checks    eleven small truths (load/checks.py); they need room for about 20 adapters
Everything is bounded in count; all times are wall seconds that the client sees. The result goes to stdout as JSON,
progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import tinker
from load import checks, ckpt, clients, core, overhead, sample
from load.context import Load, log
from load.make_model import make_model
from load.measure import difference, machine_cpu, tree_cpu, tree_memory

SECTIONS = {
    "core": core.run,
    "overhead": overhead.run,
    "sample": sample.run,
    "ckpt": ckpt.run,
    "clients": clients.run,
    "checks": checks.run,
}


def run(settings: argparse.Namespace) -> dict[str, Any]:
    """Run the sections asked for; the file named by --out is complete after each."""
    load = Load(settings)
    report: dict[str, Any] = {
        "base_url": settings.base_url,
        "base_model": settings.base_model,
        "label": settings.label,
        "sdk": getattr(tinker, "__version__", "?"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "workload": {
            name: getattr(settings, name)
            for name in ("batch", "seq", "steps", "rank", "samples", "sample_tokens")
        },
        "mem_start": tree_memory(settings.server_pid),
    }
    for name in settings.only.split(","):
        log("section", name)
        report[name] = _section(load, name)
        log(name, json.dumps(report[name])[:1500])
        _write(settings.out, report)
    report["mem_end"] = tree_memory(settings.server_pid)
    _write(settings.out, report)
    return report


def _section(load: Load, name: str) -> dict[str, Any]:
    pid = load.settings.server_pid
    machine, server, driver = machine_cpu(), tree_cpu(pid), time.process_time()
    started = time.perf_counter()
    try:
        result: dict[str, Any] = SECTIONS[name](load)
    except Exception as error:  # the other sections still tell something
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    wall_s = time.perf_counter() - started
    result["section_s"] = round(wall_s, 2)
    driver_s = time.process_time() - driver
    result["driver_cpu_s"] = round(driver_s, 2)
    used = difference(machine_cpu(), machine)
    if used is not None:
        # CPU cores kept busy by anything that is neither this driver nor the server.
        others = used - driver_s - (difference(tree_cpu(pid), server) or 0.0)
        result["other_cores_busy"] = round(max(0.0, others) / wall_s, 2)
    return result


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1), "utf-8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make-model", metavar="DIR", type=Path)
    parser.add_argument("--base-url", default="http://127.0.0.1:8010")
    parser.add_argument("--base-model")
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY", "tml-dummy"))
    parser.add_argument("--label", default="")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--train-unembed", type=int, choices=(0, 1), default=None)
    parser.add_argument("--vocab", type=int, default=256, help="token ids are drawn below this")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--client-steps", type=int, default=10)
    parser.add_argument("--client-warmup", type=int, default=3)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--sample-tokens", type=int, default=64)
    parser.add_argument("--server-pid", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one call")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--checks", default="", help=f"of {','.join(checks.CHECKS)}")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args(arguments)
    if not settings.make_model and not settings.base_model:
        parser.error("--base-model is required")
    for asked, known in ((settings.only, SECTIONS), (settings.checks, checks.CHECKS)):
        for name in filter(None, asked.split(",")):
            if name not in known:
                parser.error(f"{name!r} is not one of {', '.join(known)}")
    return settings


def main() -> None:
    """Run, print, and leave at once: threads of the SDK may linger."""
    settings = parse()
    if settings.make_model:
        make_model(settings.make_model)
        return
    report = run(settings)
    print(json.dumps(report, indent=1))
    sys.stdout.flush()
    os._exit(1 if any("error" in report[name] for name in settings.only.split(",")) else 0)


if __name__ == "__main__":
    main()
