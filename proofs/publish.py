"""Publishing 2 GiB in 16 shards from 2 nodes costs at most 1.10 of writing the same bytes plainly, with XXH3.

Runs `lilo-volume bench --json`. Smaller, to look at: `make prove-publish ARGS="--size 256MiB --passes 3"`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from _proof import Proof

LIMIT_S = 3600.0
MAX_RATIO = 1.10
MIN_VERIFY_SHARE = 0.80
MAX_IMPORT_S = 0.05
IMPORT = "import time; start = time.process_time(); import lilo_volume; print(time.process_time() - start)"
MAX_MEMORY_BYTES = 64 * 1024 * 1024
"""Of a node that writes 1 GiB: blocks, thread stacks, messages; not a shard (128 MiB)."""


def main() -> None:
    """Run the command, check its figures."""
    proof = Proof("publish")
    with proof.part("the package imports"), tempfile.TemporaryDirectory() as folder:
        proof.at_most("import lilo_volume, CPU seconds", import_s(folder), MAX_IMPORT_S)
    with proof.part("the benchmark runs"), tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-m", "lilo_volume.cli", "bench", folder, "--json", *sys.argv[1:]],
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        check(proof, json.loads(run.stdout))
    proof.end()


def check(proof: Proof, figures: dict) -> None:
    """The figures that are required, and those that are only told."""
    ratio = figures["publish_over_write_p50"]
    proof.at_most("publish over write, xxh3, fsync (p50)", ratio, MAX_RATIO)
    unsynced = figures["publish_over_write"]["xxh3"]["p50"]
    proof.at_most("publish over write, xxh3, no fsync (p50)", unsynced, MAX_RATIO)
    for way, what in (
        ("sha256_fsync", "sha256, fsync"),
        ("sha256", "sha256, no fsync"),
        ("copying_fsync", "copying mode, xxh3, fsync"),
    ):
        told(proof, f"publish over write, {what} (p50)", figures["publish_over_write"][way]["p50"])
    for way, seconds in figures["extra_cpu_seconds_per_gib"].items():
        told(proof, f"extra CPU seconds per GiB, {way}", seconds)
    for way, rates in figures["verify_full"].items():
        # Reading costs more than XXH3 itself, so that its own rate is that of digesting what is read; SHA-256 is
        # held against digesting memory.
        against = "digest" if way == "sha256" else "read_and_digest"
        share = rates[f"verify_over_{against}"]
        proof.at_least(f"verify=full over {against}, {way}", share, MIN_VERIFY_SHARE)
        told(proof, f"verify=full over digest in memory, {way}", rates["verify_over_digest"])
        told(proof, f"verify=full, {way}, GiB/s", rates["verify_gib_per_second"])
    proof.at_most(
        "memory growth of a node, bytes", figures["memory_growth_bytes"], MAX_MEMORY_BYTES
    )
    told(proof, "plain write with fsync, GiB/s", figures["gib_per_second_p50"]["plain_fsync"])
    told(proof, "load", figures["load_1m"])


def import_s(folder: str) -> float:
    """The quickest of several: of files compiled before, as an installed package has them."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = folder
    command = [sys.executable, "-c", IMPORT]
    return min(
        float(subprocess.check_output(command, env=env, text=True, timeout=60)) for _ in range(15)
    )


def told(proof: Proof, figure: str, measured: float) -> None:
    """A figure without a limit."""
    proof.figure(figure, measured, "told", True)


if __name__ == "__main__":
    main()
