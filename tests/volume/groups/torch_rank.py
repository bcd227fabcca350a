"""One rank of a torch job that runs the contract of groups: `torch_rank.py PORT WORLD_SIZE RANK`."""

import sys
from datetime import timedelta

import torch.distributed as dist
from lilo_volume.groups.torch import torch_group
from lilo_volume.testing.group_contract import GROUP_CONTRACT


def main() -> None:
    port, world_size, rank = map(int, sys.argv[1:])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=40),
    )
    groups = []  # kept: a group must stay open until every rank has done its part
    for check in GROUP_CONTRACT:
        groups.append(torch_group(node=f"node {rank}"))
        check(groups[-1])
        print("kept:", check.__name__, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
