"""Builds all ranks of a layout, one process each, and prints what rank 0 was built with, as JSON.

A program of its own: it forks before anything starts a thread, so that torch is imported once and not by every rank.
Reads the definition from standard input; the argument is a folder to meet in.
"""

from __future__ import annotations

import json
import os
import sys

from lilo_definitions import Definition
from lilo_engine.commands.backend import BackendConfig
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.ranks.place import RankPlace
from lilo_miles_backend.ranks.rank import Rank


def main() -> None:
    """One JSON object: field of the definition -> what was found."""
    definition = Definition.model_validate_json(sys.stdin.read())
    world = definition.topology.world_size
    ranks: list[int] = []
    for rank in range(1, world):
        if (child := os.fork()) == 0:
            build(definition, rank, sys.argv[1])
            os._exit(0)
        ranks.append(child)
    found = build(definition, 0, sys.argv[1])
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    assert codes == [0] * (world - 1), codes
    print(json.dumps(found))


def build(definition: Definition, rank: int, folder: str) -> dict[str, int]:
    topology = definition.topology
    config = BackendConfig(definition=definition, checkpoints_root=folder, epoch=1)
    place = RankPlace(rank=rank, world_size=topology.world_size, rendezvous=f"file://{folder}/meet")
    built = Rank(config, BackendSettings(), place)
    parallel = built._parallel
    found = {
        "topology.tp": parallel.tp.size,
        "topology.cp": parallel.cp.size,
        "topology.dp": parallel.dp.size,
        "rows of the head": built._model.head_weight.shape[0],
    }
    built.close()
    return found


if __name__ == "__main__":
    main()
