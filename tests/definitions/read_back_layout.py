"""Has all ranks of a layout meet, one process each, and prints the groups that rank 0 ended up with, as JSON.

A program of its own: it forks before anything starts a thread, so that torch is imported once and not by every rank.
Reads the definition from standard input; the argument is a folder to meet in.
"""

from __future__ import annotations

import json
import os
import sys

from lilo_definitions import Definition
from lilo_miles_backend.ranks.device import Device
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.place import RankPlace


def main() -> None:
    """One JSON object: field of the definition -> what was found."""
    definition = Definition.model_validate_json(sys.stdin.read())
    world = definition.topology.world_size
    ranks: list[int] = []
    for rank in range(1, world):
        if (child := os.fork()) == 0:
            join(definition, rank, sys.argv[1])
            os._exit(0)
        ranks.append(child)
    found = join(definition, 0, sys.argv[1])
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    assert codes == [0] * (world - 1), codes
    print(json.dumps(found))


def join(definition: Definition, rank: int, folder: str) -> dict[str, int]:
    topology = definition.topology
    place = RankPlace(rank=rank, world_size=topology.world_size, rendezvous=f"file://{folder}/meet")
    minutes = definition.limits.distributed_timeout_minutes
    parallel = Parallel.join(topology, Device.cpu(threads=1), timeout_minutes=minutes, place=place)
    found = {
        "topology.tp": parallel.tp.size,
        "topology.cp": parallel.cp.size,
        "topology.dp": parallel.dp.size,
    }
    parallel.leave()
    return found


if __name__ == "__main__":
    main()
