"""Random histories of a volume with retention: saves, crashes, damage, pins, quarantines, leases, lives, collections.

The state machines that `make test` runs a few times, run many times: `make prove-histories ARGS="--examples 2000"`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from _proof import Proof

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.volume.retention.test_history import History, HistoryOfViews


def main() -> None:
    """Run both machines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300, help="histories of each (300)")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # that a history skips what is bad is no news
    proof = Proof("histories")
    for what, machine in (("a directory", History), ("a view per container", HistoryOfViews)):
        with proof.part(f"histories on {what}"):
            proof.at_least(
                f"histories on {what}", told(machine, options.examples), options.examples
            )
    proof.end()


def told(machine: type[RuleBasedStateMachine], examples: int) -> int:
    """How many histories were run without a violation; the first violation is raised, with its steps."""
    count = 0

    class Counted(machine):  # pyright: ignore[reportGeneralTypeIssues] - the class is an argument
        def teardown(self) -> None:
            nonlocal count
            count += 1
            super().teardown()

    run_state_machine_as_test(
        Counted,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
            ],
        ),
    )
    return count


if __name__ == "__main__":
    main()
