"""A rank with a real process group and no model: what launchers do to ranks does not depend on what these compute.

Commands say by the model's name what happens, so that the driver, the processes and the collectives are the real ones:

    sum             all-reduce of ones
    raise-before-1  rank 1 raises before the collective; raise-in-1: while rank 0 waits in it; raise-after-1
    refuse          all ranks refuse; refuse-1: rank 1 alone does
    late-1-5        rank 1 comes 5 s late
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Published, RankProgress
from lilo_engine.errors import CommandFailed, InvalidRequest
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.progress import Progress
from lilo_miles_backend.rank_commands import DropGradients, Persist, RankInfo, StepOptimizer
from lilo_miles_backend.ranks.place import RankPlace


class LightRank:
    def __init__(self, config: BackendConfig, settings: BackendSettings, place: RankPlace) -> None:
        self.place = place
        self.config = config
        self.progress_ = Progress()
        torch.set_num_threads(1)
        self.limit = timedelta(minutes=config.definition.limits.distributed_timeout_minutes)
        if config.definition.model.source == f"fails-on-{place.rank}":
            raise ValueError(f"rank {place.rank} cannot read its weights")
        dist.init_process_group(
            "gloo",
            init_method=place.rendezvous,
            rank=place.rank,
            world_size=place.world_size,
            timeout=self.limit,
        )

    def info(self) -> RankInfo:
        return RankInfo(
            rank=self.place.rank,
            pid=os.getpid(),
            device="cpu",
            losses=("cross_entropy",),
            group_limits_s={"world": self.limit.total_seconds()},
        )

    def execute(self, command: object) -> object:
        with self.progress_.of(type(command).__name__):
            match command:
                case StepOptimizer():
                    return {"sum": act(command.model_id, self.place.rank)}
                case DropGradients():
                    return None
                case _:
                    raise AssertionError(f"a light rank knows no {command}")

    def persist(self, command: Persist) -> Published:
        with self.progress_.of("Persist"):
            name = command.destination.name
            if name == "refused":
                raise CommandFailed("nothing was published")
            time.sleep(float(name.partition("-")[2] or 0))
            return Published(
                run_id=command.destination.run_id,
                kind=command.destination.kind,
                name=name,
                attempt="a",
                folder=f"/rank-{self.place.rank}",
                size_bytes=1,
                digest="d",
            )

    def progress(self) -> RankProgress:
        view = self.progress_.view()
        return RankProgress(
            rank=self.place.rank,
            pid=os.getpid(),
            completed_commands=view.completed_commands,
            running=view.running,
            age_s=view.age_s,
        )

    def close(self) -> None:
        dist.destroy_process_group()


def act(what: str, me: int) -> float:
    """Do what the words say, around one all-reduce of ones over all ranks: their number."""
    verb, _, rest = what.partition("-")
    when, _, number = rest.rpartition("-")
    if verb == "refuse" and (not rest or int(rest) == me):
        raise InvalidRequest("there are no gradients")
    if verb == "late" and int(when) == me:
        time.sleep(float(number))
    if verb == "raise" and when == "before" and int(number) == me:
        raise ValueError("before")
    if verb == "raise" and when == "in" and int(number) == me:
        time.sleep(0.3)
        raise ValueError("in")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if verb == "raise" and when == "after" and int(number) == me:
        raise ValueError("after")
    return float(ones)
