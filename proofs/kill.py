"""Ranks killed and stopped at random: readers get the old checkpoint or the new one, and nobody waits too long.

200 rounds of 2 nodes x 2 ranks as processes over the tcp group, half of them on a directory, half on a volume with a
view per node. `make prove-kill`, or with fewer rounds: `make prove-kill ARGS="--rounds 20"`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from _proof import Proof

DEADLINE_S = 1.0
SLACK_S = 2.0
"""Beyond the deadline: half a second in which rank 0 may still name who is missing, and a busy machine."""
ROUNDS = Path(__file__).with_name("_kill.py")
LIMIT_S = 900.0
MOST_FILES = 2 * 6 + 6
"""Two checkpoints of 4 shards, a manifest and a note; a lease of the reader, and what is being removed meanwhile."""


def main() -> None:
    """Run the rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    options = parser.parse_args()
    command = [sys.executable, str(ROUNDS), "--rounds", str(options.rounds)]
    command += ["--seed", str(options.seed), "--deadline", str(DEADLINE_S)]
    proof = Proof("kill")
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    tally = json.loads(done.stdout) if done.returncode == 0 else {}
    told = ("steps_hit", "errors", "resumed", "collections", "dead_collections")
    print(f"seed {options.seed}:", {key: tally.get(key) for key in told}, file=sys.stderr)
    for violation in tally.get("violations", []):
        print(violation, file=sys.stderr)
    proof.equal("exit code of the rounds", done.returncode, 0)
    proof.at_least("rounds", tally.get("rounds", 0), options.rounds)
    proof.at_least("processes killed", tally.get("killed", 0), options.rounds // 5)
    proof.at_least("processes stopped", tally.get("stopped", 0), options.rounds // 10)
    proof.at_least("rounds that published", tally.get("whole", 0), 1)
    proof.at_least("rounds that did not", tally.get("rounds", 0) - tally.get("whole", 0), 1)
    proof.equal(
        "readers that got neither the old nor the new", len(tally.get("violations", "?")), 0
    )
    proof.at_least("loads by readers beside the publishers", tally.get("readings", 0), 1)
    limit = f"longest wait beyond the deadline of {DEADLINE_S:g} s"
    proof.at_most(f"{limit}, in one collective, in s", tally.get("longest_wait_s", 1e9), SLACK_S)
    proof.at_most(
        f"{limit}, from the fault to the end of the last rank, in s",
        tally.get("longest_after_fault_s", 1e9),
        SLACK_S,
    )
    proof.at_most("files after a collection", tally.get("most_files", 10**9), MOST_FILES)
    proof.at_most(
        "seconds in all", round(time.monotonic() - start, 1), 240.0 * options.rounds / 200 + 60
    )
    proof.end()


if __name__ == "__main__":
    main()
