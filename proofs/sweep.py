"""Crash sweep: every named step x every rank x {stop, raise, fail after} x all modes; broken protocols are caught.

2 nodes x 2 ranks, as threads on the emulator, in place and in copying mode, against the invariants I1-I10. All cases take
about half an hour of one core per protocol: `make prove-sweep ARGS="--pairwise"` is the short form, which `make test`
runs too. `--jobs` processes share the work.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lilo_volume.testing.sweep import (
    INVARIANTS,
    PROTOCOLS,
    SweepReport,
    all_settings,
    pairwise_settings,
    sweep,
)

from tests.volume.sweep.broken import BROKEN

_TELL_EVERY_S = 15.0


class Figures:
    """Prints each figure as one JSON object. The standard library alone, so that it runs where nothing else is."""

    def __init__(self) -> None:
        self.failed = 0

    def figure(self, figure: str, measured: object, required: str, good: bool) -> None:
        """Print one figure and remember whether it holds."""
        self.failed += not good
        line = {
            "proof": "sweep",
            "figure": figure,
            "measured": measured,
            "required": required,
            "pass": good,
        }
        print(json.dumps(line), flush=True)


def share(task: tuple[str, bool, int, int]) -> SweepReport:
    """One process's share of the settings of a protocol."""
    logging.disable(logging.CRITICAL)
    name, pairwise, part, parts = task
    settings = pairwise_settings() if pairwise else all_settings()
    return sweep(PROTOCOLS[name], settings[part::parts])


def swept(figures: Figures, name: str, *, pairwise: bool, jobs: int) -> None:
    """Sweep one protocol and print what was found."""
    settings = len(pairwise_settings() if pairwise else all_settings())
    parts = min(settings, jobs * 8)
    tasks = [(name, pairwise, part, parts) for part in range(parts)]
    started = told = time.monotonic()
    reports: list[SweepReport] = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for report in pool.imap_unordered(share, tasks):
            reports.append(report)
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                print(f"{name}: {len(reports)} of {parts} shares", file=sys.stderr, flush=True)
    violations = [violation for report in reports for violation in report.violations]
    for violation in violations[:20]:
        print(f"{violation.invariant}: {violation.what}\n    {violation.case}", file=sys.stderr)
    runs = sum(report.runs for report in reports)
    steps = {step for report in reports for step in report.steps}
    seconds = time.monotonic() - started
    print(f"{name}: {runs} runs in {seconds:.0f} s; steps {sorted(steps)}", file=sys.stderr)
    figures.figure(f"{name}: settings of the volume", settings, ">= 12", settings >= 12)
    figures.figure(f"{name}: runs", runs, f">= {settings * 90}", runs >= settings * 90)
    figures.figure(f"{name}: named steps that were failed", len(steps), ">= 20", len(steps) >= 20)
    broken = Counter(violation.invariant for violation in violations)
    for number, invariant in INVARIANTS.items():
        figures.figure(
            f"{name}: violations of {number} ({invariant})",
            broken[number],
            "== 0",
            not broken[number],
        )
    figures.figure(f"{name}: violations", len(violations), "== 0", not violations)


def caught(figures: Figures) -> None:
    """Every protocol that is broken on purpose is caught by the same sweep."""
    logging.disable(logging.CRITICAL)
    # The unkind settings first: one violation is enough.
    settings = sorted(
        pairwise_settings(), key=lambda s: (s.modes.commit_atomic, s.modes.rpc_faults != "mid")
    )
    for name, (saving, invariant) in BROKEN.items():
        report = sweep(saving, settings, until=invariant)
        seen = next((v for v in report.violations if v.invariant == invariant), None)
        measured = (
            f"not in {report.runs} runs" if seen is None else f"run {report.runs}: {seen.what}"
        )
        figures.figure(
            f"broken protocol is caught: {name}", measured, f"breaks {invariant}", seen is not None
        )


def main() -> None:
    """Run both sweeps and the broken protocols."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairwise", action="store_true", help="pairwise modes instead of all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--protocol", choices=list(PROTOCOLS), action="append")
    options = parser.parse_args()
    # So that whoever ends this process ends those that it started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    figures = Figures()
    caught(figures)
    for name in options.protocol or PROTOCOLS:
        swept(figures, name, pairwise=options.pairwise, jobs=options.jobs)
    sys.exit(1 if figures.failed else 0)


if __name__ == "__main__":
    main()
