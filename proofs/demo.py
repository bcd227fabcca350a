"""`lilo demo` lifts the reward from at most 0.25 to at least 0.50 for seeds 0, 1 and 2, in under 3 minutes each."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from _proof import Proof

LAST_LINE = re.compile(
    r"^demo: reward (\d\.\d{3}) -> (\d\.\d{3}) in (\d+) steps, (\d+(?:\.\d+)?) s$"
)
LIMIT_S = 180.0


def main() -> None:
    """Run it as a user would, once for each seed."""
    proof = Proof("demo")
    for seed in (0, 1, 2):
        with proof.part(f"seed {seed}: runs"), tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "reward.png"
            command = [sys.executable, "-c", "from lilo_engine.cli import main; main()", "demo"]
            command += ["--seed", str(seed), "--out", str(picture)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False
            )
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            proof.equal(f"seed {seed}: exit code", done.returncode, 0)
            last = (done.stdout.strip().splitlines() or [""])[-1]
            match = LAST_LINE.match(last)
            proof.figure(f"seed {seed}: last line", last, LAST_LINE.pattern, match is not None)
            if match:
                proof.at_most(f"seed {seed}: reward before", float(match[1]), 0.25)
                proof.at_least(f"seed {seed}: reward after", float(match[2]), 0.50)
                proof.at_most(f"seed {seed}: seconds", float(match[4]), LIMIT_S)
            size = picture.stat().st_size if picture.exists() else 0
            proof.at_least(f"seed {seed}: bytes of reward.png", size, 1000)
    proof.end()


if __name__ == "__main__":
    main()
