"""What a driver costs: a command to all ranks, spawned and over Ray; engine, bridge and Ray on steps of a second.

Both ranks of the broadcasts are real processes with a real process group and no model; the long steps are those of
`tiny` on one rank, once called directly in this process and once through HTTP, engine, bridge and Ray, in turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _bare import LONG_ROWS, Overhead, bare_trainer, overhead
from _proof import Proof, tiny_server
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.operations.operation import ModelId
from lilo_miles_backend.cluster.ray_ranks import start_ray_ranks
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.driver import DrivenRanks
from lilo_miles_backend.launchers.spawned import spawn_ranks
from lilo_miles_backend.rank_commands import DropGradients

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.cluster.conftest import LIGHT, world_of_two
from tests.cluster.hosts import Cluster, cluster, two_hosts

BROADCAST_MS = 3.0
SHARE = 0.03
NUM_COMMANDS = 300


def main() -> None:
    """One Ray node for all of it."""
    proof = Proof("driver")
    with (
        tempfile.TemporaryDirectory(prefix="lilo-driver-") as name,
        two_hosts(apart=False) as hosts,
        cluster(hosts) as ray,
    ):
        os.environ |= {**hosts[0].environment, "RAY_LOG_TO_DRIVER": "0"}
        ray.start_head(2)
        folder = Path(name)
        config = BackendConfig(
            definition=world_of_two(), checkpoints_root=str(folder / "light"), epoch=1
        )
        settings = BackendSettings(rank_class=LIGHT)
        broadcasts(proof, "spawned", spawn_ranks(config, settings))
        broadcasts(proof, "over Ray", start_ray_ranks(config, settings, ray.address))
        long_steps(proof, ray, folder)
    proof.end()


def broadcasts(proof: Proof, how: str, ranks: DrivenRanks) -> None:
    """Commands that do nothing, one after another."""
    command = DropGradients(model_id=ModelId("any"))
    try:
        for _ in range(20):
            ranks.train(command)
        took: list[float] = []
        used_s = _cpu_s()
        for _ in range(NUM_COMMANDS):
            started = time.perf_counter()
            ranks.train(command)
            took.append(time.perf_counter() - started)
        used_s = _cpu_s() - used_s
    finally:
        ranks.close()
    proof.at_most(f"a command to two ranks, {how}, ms", 1e3 * statistics.median(took), BROADCAST_MS)
    proof.figure("the same, CPU of the driver, ms", 1e3 * used_s / NUM_COMMANDS, "reported", True)


def long_steps(proof: Proof, ray: Cluster, folder: Path) -> None:
    """The same steps on the bare trainer, and through everything."""
    with bare_trainer(folder / "bare") as bare:
        os.environ["LILO_RAY_ADDRESS"] = ray.address
        try:
            with tiny_server() as server:
                backend = _backend_of(server.pid)
                before_s, started_s = sum(backend.cpu_times()[:2]), time.monotonic()
                found: Overhead = overhead(bare, server, LONG_ROWS)
                driver_share = (sum(backend.cpu_times()[:2]) - before_s) / (
                    time.monotonic() - started_s
                )
        finally:
            del os.environ["LILO_RAY_ADDRESS"]
    proof.at_least("a long step on the bare trainer, s", found.bare.wall_s, 1.0)
    proof.at_most("engine, bridge and Ray, share of its time", found.wall_share, SHARE)
    proof.at_most("CPU of front and engine, share of the trainer's", found.cpu_share, SHARE)
    proof.figure("CPU of the driver, share of one core meanwhile", driver_share, "reported", True)


def _cpu_s() -> float:
    return time.process_time()


def _backend_of(server_pid: int) -> psutil.Process:
    words = "lilo_engine.commands.serve_backend"
    return next(
        child
        for child in psutil.Process(server_pid).children(recursive=True)
        if words in " ".join(child.cmdline())
    )


if __name__ == "__main__":
    main()
