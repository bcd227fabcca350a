"""What a Ray cluster holds right now, told by a driver of its own: `python observe.py HOST:PORT` prints JSON."""

from __future__ import annotations

import json
import logging
import sys

import ray
from ray._private.state import actors
from ray.util import placement_group_table


def main() -> None:
    ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
    total, free = ray.cluster_resources(), ray.available_resources()
    print(
        json.dumps(
            {
                "nodes": sum(node["Alive"] for node in ray.nodes()),
                "cpus": total.get("CPU", 0),
                "free_cpus": free.get("CPU", 0),
                "groups": sum(
                    group["state"] != "REMOVED" for group in placement_group_table().values()
                ),
                "actors": sum(actor["State"] != "DEAD" for actor in actors().values()),
            }
        )
    )


if __name__ == "__main__":
    main()
