"""A few rounds of `make prove-kill`: processes are killed and stopped while they publish, on both kinds of volume."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = Path(__file__).parents[2] / "proofs" / "_kill.py"
DEADLINE_S = 1.0
SLACK_S = 5.0
"""For a machine that runs other tests too; the proof asks for less."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.parametrize("place", ["directory", "views"])
def test_readers_get_the_old_or_the_new_and_nobody_waits_beyond_the_deadline(place):
    command = [sys.executable, str(ROUNDS), "--rounds", "6", "--seed", "7", "--places", place]
    done = subprocess.run(
        [*command, "--deadline", str(DEADLINE_S)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=55,
        check=True,
    )
    tally = json.loads(done.stdout)
    assert tally["violations"] == []
    assert tally["rounds"] == 7
    assert tally["killed"] + tally["stopped"] > 0
    assert tally["readings"] > 0
    assert tally["longest_wait_s"] < SLACK_S
    assert tally["longest_after_fault_s"] < SLACK_S
