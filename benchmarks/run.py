#!/usr/bin/env python3
"""Start `lilo serve tiny`, run the load driver against it, print a short table: what `make bench` does.

    python benchmarks/run.py [--out result.json] [any option of tinker_load.py]

The exit code is not 0 if a section failed or a check did not pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lilo_engine.demo.server import LocalServer
from rich.console import Console
from rich.table import Table

DRIVER = Path(__file__).with_name("tinker_load.py")
LIMIT_S = 1800.0
"""For the whole driver; a run on two idle cores takes a few minutes."""


def run_load(out: Path, options: list[str]) -> dict[str, Any]:
    """All sections (or those that `options` name) against a server of our own; the driver's report."""
    with (
        tempfile.TemporaryDirectory(prefix="lilo-bench-") as folder,
        LocalServer("tiny", Path(folder)) as server,
    ):
        command = [sys.executable, str(DRIVER), "--base-url", server.base_url]
        command += ["--api-key", server.api_key, "--base-model", "tiny"]
        command += ["--server-pid", str(server.pid), "--out", str(out), *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    return json.loads(out.read_text("utf-8"))


def rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, figure, and what it is to be compared with, for the sections that were run."""
    table: list[tuple[str, str, str]] = []
    if core := _good(report, "core"):
        for name in ("awaited", "pipelined"):
            part = core[name]
            table.append(
                (
                    f"step of 8 x 128 tokens, {name}",
                    f"{part['step']['p50_ms']:.1f} ms",
                    f"{part['tokens_per_s']:,.0f} tokens/s, {part.get('server_cpu_s_per_step')} CPU-s a step",
                )
            )
    if overhead := _good(report, "overhead"):
        awaited, pipelined = (
            overhead[f"{name}_step"]["p50_ms"] for name in ("awaited", "pipelined")
        )
        deep = overhead["deep_queue_ms_per_step"]
        table.append(("almost empty step, awaited", f"{awaited:.1f} ms", "below 30 ms"))
        table.append(
            (
                "almost empty step, pipelined",
                f"{pipelined:.1f} ms",
                f"below 20 ms; {pipelined / awaited:.2f} x awaited; deep queue {deep:.1f} ms",
            )
        )
    if sample := _good(report, "sample"):
        one = sample["one_request_num_samples"]["s_per_request"]
        many = sample["many_requests"]["wall_s"]
        table.append(
            ("one-token sample", f"{sample['one_token_call']['p50_ms']:.1f} ms", "below 20 ms")
        )
        table.append(
            (
                "32 requests of one sequence",
                f"{many:.3f} s",
                f"{many / one:.2f} x one request of 32",
            )
        )
        table.append(
            (
                "publish in a loop",
                f"{sample['publish_in_loop']['p50_ms']:.1f} ms",
                "new weights sampled",
            )
        )
    if ckpt := _good(report, "ckpt"):
        table.append(("save_state", f"{ckpt['save_state']['p50_ms']:.1f} ms", "with optimizer"))
        restore = ckpt["restore_into_new_client_s"]
        table.append(("load into a new client", f"{1e3 * restore:.1f} ms", "with optimizer"))
    table += _client_rows(_good(report, "clients") or {})
    if checks := _good(report, "checks"):
        table.append(("checks", f"{checks['passed']} of {checks['of']}", _failed(checks)))
    return table


def _client_rows(clients: dict[str, Any]) -> list[tuple[str, str, str]]:
    counts = [count for count in clients if count.isdigit() and "full" in clients[count]]
    table: list[tuple[str, str, str]] = []
    for count in counts:
        full, empty = clients[count]["full"], clients[count]["empty"]
        first_full, first_empty = clients[counts[0]]["full"], clients[counts[0]]["empty"]
        table.append(
            (
                f"{count} client{'s' if count != '1' else ''}",
                f"{full['tokens_per_s']:,.0f} tokens/s",
                f"full {full['steps_per_s'] / first_full['steps_per_s']:.2f} x, "
                f"empty {empty['steps_per_s'] / first_empty['steps_per_s']:.2f} x {counts[0]} client; "
                f"last end / first {full['last_end_s'] / full['first_end_s']:.2f}",
            )
        )
    return table


def _failed(checks: dict[str, Any]) -> str:
    failed = [
        name
        for name, verdict in checks.items()
        if isinstance(verdict, dict) and not verdict.get("ok")
    ]
    return f"failed: {', '.join(failed)}" if failed else "all passed"


def _good(report: dict[str, Any], section: str) -> dict[str, Any] | None:
    part = report.get(section)
    return None if part is None or "error" in part else part


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the driver's whole report, as JSON")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run_load(arguments.out or Path(folder) / "report.json", options)
    table = Table(title="lilo serve tiny, seen from the SDK")
    for name in ("what", "figure", ""):
        table.add_column(name)
    for row in rows(report):
        table.add_row(*row)
    Console().print(table)
    sections = {name: part for name, part in report.items() if isinstance(part, dict)}
    errors = {name: part["error"] for name, part in sections.items() if "error" in part}
    for name, error in errors.items():
        print(f"section {name} failed: {error}", file=sys.stderr)
    checks = report.get("checks", {})
    return 1 if errors or checks.get("passed") != checks.get("of") else 0


if __name__ == "__main__":
    sys.exit(main())
