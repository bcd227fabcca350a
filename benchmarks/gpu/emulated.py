"""Emulated ranks: one rank's share of a large layout in one process, without the other ranks.

Collectives move nothing: what others would have sent is a copy of this rank's own, so that every buffer has its size and
holds ordinary numbers, and every kernel does what it would do; results mean nothing. What the network would cost is
therefore missing from the time, and has to be added.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lilo_definitions import Definition
from lilo_engine.commands.backend import BackendConfig
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.ranks import parallel, storage
from lilo_miles_backend.ranks.place import RankPlace
from lilo_miles_backend.ranks.rank import Rank
from lilo_volume import SoloGroup
from torch.testing._internal.distributed import fake_pg

_Store = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]


class _Done:
    """What a collective that was asked for early returns."""

    def wait(self, *_: object) -> None:
        """It has happened."""

    def is_completed(self) -> bool:
        """Likewise."""
        return True


def emulate() -> None:
    """From now on this process talks to nobody, whatever its groups."""
    started, made = dist.init_process_group, dist.new_group

    def init(_backend: str, *, rank: int, world_size: int, **_other: Any) -> None:
        assert fake_pg, "imported, which makes the backend known"
        started("fake", store=_Store(), rank=rank, world_size=world_size)

    def new_group(*arguments: Any, **given: Any) -> Any:
        given.pop("backend", None)
        return made(*arguments, **given)

    dist.init_process_group = init
    dist.new_group = new_group
    replaced = {
        "all_gather": all_gather,
        # torch 2.13 has other names for the same.
        "all_gather_into_tensor": all_gather_into_tensor,
        "all_gather_single": all_gather_into_tensor,
        "reduce_scatter": reduce_scatter,
        "reduce_scatter_tensor": reduce_scatter_tensor,
        "reduce_scatter_single": reduce_scatter_tensor,
    }
    for name, function in replaced.items():
        setattr(dist, name, function)
    dist.all_reduce = lambda *_, **given: _done(given)
    dist.all_gather_object = all_gather_object
    dist.barrier = lambda *_, **given: _done(given)
    parallel._connect = lambda *_: None
    # The limits of such groups cannot be read back, and nothing is published.
    parallel._limits = dict[str, float]
    storage._group_of = lambda _: SoloGroup()


def rank_of(what: Definition, checkpoints_root: str) -> Rank:
    """Rank 0 of the definition's layout, alone."""
    config = BackendConfig(definition=what, checkpoints_root=checkpoints_root, epoch=1)
    place = RankPlace(rank=0, world_size=what.topology.world_size, rendezvous="none")
    return Rank(config, BackendSettings(), place)


def all_gather(outputs: list[torch.Tensor], mine: torch.Tensor, **given: Any) -> _Done | None:
    """Everybody sent what this rank has."""
    for one in outputs:
        one.copy_(mine)
    return _done(given)


def all_gather_into_tensor(output: torch.Tensor, mine: torch.Tensor, **given: Any) -> _Done | None:
    """Likewise, into one tensor."""
    output.view(-1, *mine.shape).copy_(mine.expand(output.numel() // mine.numel(), *mine.shape))
    return _done(given)


def reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], **given: Any) -> _Done | None:
    """Nobody else had anything to add."""
    output.copy_(parts[0])
    return _done(given)


def reduce_scatter_tensor(
    output: torch.Tensor, whole: torch.Tensor, *_: Any, **given: Any
) -> _Done | None:
    """Likewise, from one tensor."""
    output.copy_(whole.view(-1, *output.shape)[0])
    return _done(given)


def all_gather_object(outputs: list[Any], mine: object, **_: Any) -> None:
    """Everybody said the same."""
    outputs[:] = [mine] * len(outputs)


def _done(given: dict[str, Any]) -> _Done | None:
    return _Done() if given.get("async_op") else None
