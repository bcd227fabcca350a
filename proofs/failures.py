"""What goes wrong on a cluster is a clear error in seconds, and costs nothing that is not given back.

Two hosts (network namespaces where this is root; else two raylets), the real ranks over Ray, one on each. Each case
tells the seconds to its error beyond the limit that it waits for, what was said, and what the cluster holds afterwards.

    before the start    a node missing, late, without devices
    while it runs       a rank stopped, an exception before, in and after a collective, a limit of 3 s with 5 s
    the machine         a link cut, a node killed
    two SDK clients     kill -9 of a rank, a raylet and the backend in mid-step (`_kills.py`)

    python proofs/failures.py [--only PART]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _proof import Proof
from lilo_definitions import Definition, get
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.errors import LiloError
from lilo_engine.operations.operation import AdamParams, ModelId
from lilo_miles_backend.cluster.ray_ranks import start_ray_ranks
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.driver import DrivenRanks
from lilo_miles_backend.rank_commands import StepOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from _kills import kills

from tests.cluster.faulty_rank import FAULT
from tests.cluster.hosts import Cluster, cluster, namespaces_refused, two_hosts

BEYOND_S = 10.0
"""Allowed beyond the limit that a case waits for."""
SILENCE_S = 5.0
WAIT_S = 3.0
"""For a node that never comes."""
OBSERVE_LIMIT_S = 120.0
GIVE_BACK_S = 15.0
LATE_S = 5.0
END_S = 5.0
"""For the processes of a group to be gone after its error: Ray knows of an end a little before the kernel is done."""
FREE = {"nodes": 2, "cpus": 2.0, "free_cpus": 2.0, "groups": 0, "actors": 0}
"""What a cluster of both hosts holds when nothing runs on it."""
ALONE = {"nodes": 1, "cpus": 1.0, "free_cpus": 1.0, "groups": 0, "actors": 0}
"""When the second host is gone."""
RANK = "tests.cluster.faulty_rank:FaultyRank"
PARTS = ("start", "ranks", "machines", "clients")


def main() -> None:
    """All parts on one pair of hosts, those that lose a machine last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    only = parser.parse_args().only
    proof = Proof("failures")
    reason = namespaces_refused()
    words = "two network namespaces" if reason is None else f"two raylets: {reason}"
    proof.figure("hosts", words, "either", True)
    with (
        tempfile.TemporaryDirectory(prefix="lilo-failures-") as folder,
        two_hosts(apart=reason is None) as hosts,
        cluster(hosts) as ray,
    ):
        os.environ |= {**hosts[0].environment, "RAY_LOG_TO_DRIVER": "0"}
        bench = Bench(proof, ray, Path(folder))
        ray.start_head(1)
        if only in (None, "start"):
            before_the_start(bench)
        else:
            ray.start_join(hosts[1], 1)
        if only in (None, "ranks"):
            while_it_runs(bench)
        if only in (None, "machines"):
            the_machine(bench, can_cut=reason is None)
        if only in (None, "clients"):
            kills(proof, ray, Path(folder))
        ends_with_its_head(proof, ray)
    proof.end()


def ends_with_its_head(proof: Proof, ray: Cluster) -> None:
    """Ctrl-C at the head ends the other host too."""
    joined = ray.running.pop(ray.hosts[1].name)
    started = time.monotonic()
    ray.stop(ray.hosts[0])
    joined.wait(60)
    proof.at_most(
        "seconds from Ctrl-C at the head until both hosts ended", time.monotonic() - started, 10.0
    )


@dataclass
class Bench:
    """Runs one case after another."""

    proof: Proof
    ray: Cluster
    folder: Path

    def start(
        self, definition: Definition | None = None, cluster_wait_s: float = 60.0
    ) -> DrivenRanks:
        """A group of real ranks, one on each host."""
        config = BackendConfig(
            definition=definition or over_two(),
            checkpoints_root=str(self.folder / "checkpoints"),
            epoch=1,
        )
        found = BackendSettings(
            rank_class=RANK, rank_silence_s=SILENCE_S, cluster_wait_s=cluster_wait_s
        )
        return start_ray_ranks(config, found, self.ray.address)

    def case(self, name: str, limit_s: float, call: Callable[[], Any], *, told: str) -> None:
        """One row of the table: `call` must fail in time, say `told`, and leave nothing behind."""
        before = observe(self.ray.address)
        self.fails(name, limit_s, call, told)
        self.gives_back(name, before)

    def fails(self, name: str, limit_s: float, call: Callable[[], Any], told: str) -> None:
        """The error comes in time and is clear."""
        started = time.monotonic()
        try:
            call()
            error = "no error"
        except LiloError as failure:
            error = failure.message
        beyond_s = time.monotonic() - started - limit_s
        self.proof.at_most(f"{name}: seconds beyond its limit of {limit_s:g} s", beyond_s, BEYOND_S)
        clear = re.search(told, error) is not None
        self.proof.figure(f"{name}: what is said", error, f"has {told!r}", clear)

    def gives_back(self, name: str, wanted: dict[str, float]) -> None:
        """The cluster holds what it held before."""
        end_s = time.monotonic() + GIVE_BACK_S
        while (held := observe(self.ray.address)) != wanted and time.monotonic() < end_s:
            time.sleep(0.2)
        self.proof.equal(f"{name}: held by the cluster afterwards", held, wanted)


def observe(address: str) -> dict[str, float]:
    """What a cluster holds, as a driver of its own sees it."""
    program = Path(__file__).parent.parent / "tests" / "cluster" / "observe.py"
    said = subprocess.run(
        [sys.executable, str(program), address],
        capture_output=True,
        text=True,
        timeout=OBSERVE_LIMIT_S,
        check=True,
    )
    # Ray may log to the same output, before it and after it.
    (line,) = (line for line in said.stdout.splitlines() if line.startswith("{"))
    return json.loads(line)


def over_two(*, group_limit_s: float = 120.0) -> Definition:
    """`tiny` with one context-parallel rank on each of two machines."""
    tiny = get("tiny")
    topology = tiny.topology.model_copy(update={"cp": 2, "nodes": 2})
    limits = {
        "distributed_timeout_minutes": group_limit_s / 60,
        "command_timeout_s": 60.0,
        "startup_timeout_s": 300.0,
    }
    return tiny.model_copy(
        update={"topology": topology, "limits": tiny.limits.model_copy(update=limits)}
    )


def before_the_start(bench: Bench) -> None:
    """Machines that are not there, or not what is needed."""
    ray, second = bench.ray, bench.ray.hosts[1]

    def start() -> None:
        bench.start(cluster_wait_s=WAIT_S)

    bench.case("node missing", WAIT_S, start, told="needs 2 nodes with 1 CPU each")
    ray.start_join(second, 0)
    bench.case("node without devices", WAIT_S, start, told="of which 1 can be used")
    ray.stop(second)
    timer = threading.Timer(LATE_S, ray.start_join, (second, 1), {"wait": False})
    timer.start()
    with bench.proof.part("node late"):
        ranks = bench.start(cluster_wait_s=120.0)
        bench.proof.equal("node late: ranks that start", len(ranks.info()), 2)
        ranks.close()
    timer.join()
    bench.gives_back("node late", FREE)


def while_it_runs(bench: Bench) -> None:
    """A group that goes wrong at a step."""
    for when in ("before", "in", "after"):
        step_fails(
            bench, f"exception {when} a collective", f"raise-{when}-1", 0.0, f"rank 1.*{when}"
        )
    step_fails(
        bench,
        "a limit of 3 s with a collective of 5 s",
        "late-1-5",
        3.0,
        "limits.distributed_timeout_minutes",
        over_two(group_limit_s=3.0),
    )
    ranks = bench.start()
    os.kill(ranks.info()[1].pid, signal.SIGSTOP)
    fails(bench, "rank stopped", ranks, "late-0-0", SILENCE_S, "rank 1")


def the_machine(bench: Bench, *, can_cut: bool) -> None:
    """A machine that answers nothing any more, and one that is gone."""
    ray, second = bench.ray, bench.ray.hosts[1]
    if can_cut:
        ranks = bench.start()
        threading.Timer(0.5, second.cut).start()
        fails(bench, "link cut", ranks, "late-1-60", SILENCE_S, "rank 1", ALONE)
        started = time.monotonic()
        ray.running.pop(second.name).wait(30)
        bench.proof.at_most(
            "link cut: seconds until the other host ends", time.monotonic() - started, 10.0
        )
        second.cut(down=False)
        ray.start_join(second, 1)
    else:
        bench.proof.figure("link cut", "two raylets of one machine have no link", "not here", True)
    ranks = bench.start()
    threading.Timer(0.5, ray.kill_ray, (second,)).start()
    fails(bench, "node dead", ranks, "late-1-60", 0.0, "rank 1", ALONE)
    ray.running.pop(second.name).wait(30)
    ray.start_join(second, 1)
    with bench.proof.part("node dead: a group starts when it is back"):
        ranks = bench.start(cluster_wait_s=120.0)
        bench.proof.equal("node dead: ranks that start when it is back", len(ranks.info()), 2)
        ranks.close()
    bench.gives_back("node back", FREE)


def step_fails(
    bench: Bench,
    name: str,
    fault: str,
    limit_s: float,
    told: str,
    definition: Definition | None = None,
) -> None:
    """A new group fails at a step."""
    fails(bench, name, bench.start(definition), fault, limit_s, told)


def fails(
    bench: Bench,
    name: str,
    ranks: DrivenRanks,
    fault: str,
    limit_s: float,
    told: str,
    held: dict[str, float] | None = None,
) -> None:
    """A running group fails at a step; its processes are gone by the time of the error."""
    pids = [info.pid for info in ranks.info()]
    bench.fails(name, limit_s, lambda: ranks.train(fault_step(fault)), told)
    if held is None:
        left = _left(pids)
        bench.proof.equal(f"{name}: ranks left", left, [])
    bench.gives_back(name, held or FREE)


def _left(pids: Sequence[int]) -> list[int]:
    """Those of the processes that live on. One that was killed needs a moment to be gone."""
    end_s = time.monotonic() + END_S
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < end_s:
        time.sleep(0.05)
    return left


def fault_step(words: str) -> StepOptimizer:
    """The command by which a faulty rank does something."""
    params = AdamParams(
        learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
    )
    return StepOptimizer(model_id=ModelId(f"{FAULT}{words}"), params=params)


if __name__ == "__main__":
    main()
