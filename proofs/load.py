"""The load driver runs all its sections against `lilo serve tiny` and passes 11 of its 11 checks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _proof import Proof

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"
SECTIONS = ("core", "overhead", "sample", "ckpt", "clients", "checks")


def main() -> None:
    """Run `make bench`'s script and read the report it writes."""
    proof = Proof("load")
    with proof.part("the driver runs"), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        subprocess.run(
            [sys.executable, str(BENCHMARK), "--out", str(out)],
            stdout=sys.stderr,
            timeout=1800.0,
            check=False,
        )
        report = json.loads(out.read_text("utf-8"))
        for name in SECTIONS:
            error = report.get(name, {"error": "not run"}).get("error")
            proof.figure(f"section {name}", error or "ran", "ran", error is None)
        checks = report["checks"]
        for name, verdict in checks.items():
            if isinstance(verdict, dict):
                proof.figure(f"check {name}", verdict, "ok", bool(verdict.get("ok")))
        proof.equal("checks passed", f"{checks['passed']} of {checks['of']}", "11 of 11")
        for figure, measured in _reported(report):
            proof.figure(figure, measured, "reported", True)
    proof.end()


def _reported(report: dict) -> list[tuple[str, float]]:
    """The figures that are reported whatever they are."""
    overhead, sample, clients = report["overhead"], report["sample"], report["clients"]
    figures = [
        ("almost empty step, awaited, p50 ms", overhead["awaited_step"]["p50_ms"]),
        ("almost empty step, pipelined, p50 ms", overhead["pipelined_step"]["p50_ms"]),
        ("one-token sample, p50 ms", sample["one_token_call"]["p50_ms"]),
        (
            "32 requests of one sequence against one of 32",
            sample["many_requests"]["wall_s"] / sample["one_request_num_samples"]["s_per_request"],
        ),
        ("save_state, p50 ms", report["ckpt"]["save_state"]["p50_ms"]),
    ]
    for count, one in clients.items():
        if isinstance(one, dict) and "full" in one:
            figures.append((f"{count} clients, full batch, tokens/s", one["full"]["tokens_per_s"]))
            figures.append((f"{count} clients, empty batch, steps/s", one["empty"]["steps_per_s"]))
    return figures


if __name__ == "__main__":
    main()
