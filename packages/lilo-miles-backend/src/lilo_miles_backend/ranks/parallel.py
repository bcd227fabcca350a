"""Parallel: who this rank is in the grid of ranks. The only file that asks Megatron for process groups.

World order: tensor-parallel neighbours are next to each other (they talk most), then context-, then data-parallel
ones: rank = (dp_rank * cp + cp_rank) * tp + tp_rank.

The process groups belong to the process: torch and Megatron keep them in module globals. Ranks that share a
process (several in-process trainers, as in tests) therefore share one membership, which the last one to leave ends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lilo_definitions import Topology

from lilo_miles_backend.ranks.collectives import Axis, sum_in_place
from lilo_miles_backend.ranks.device import Device
from lilo_miles_backend.ranks.megatron import get_cuda_rng_tracker, parallel_state
from lilo_miles_backend.ranks.place import RankPlace

PERSIST_TIMEOUT_S = 600.0
"""Limit of the group that publishing uses: writing one adapter takes seconds and a volume's commit minutes at most,
whatever the longest training step is."""
PERSIST = "persist"
"""Name of that group."""

_lock = threading.Lock()
_members: list[Parallel] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This rank's place and its neighbours."""

    rank: int
    world_size: int
    topology: Topology
    tp: Axis
    """Ranks with other parts of every weight matrix."""
    cp: Axis
    """Ranks with other parts of every row."""
    dp: Axis
    """Ranks with other rows."""
    dp_cp: Axis
    """All ranks with the same part of the model."""
    world: Axis
    persist: dist.ProcessGroup | None
    """A gloo group over all ranks for publishing, used by the persist thread alone; None in a world of one."""
    group_limits_s: Mapping[str, float]
    """Limit of every process group, read back from it, by its name."""

    @classmethod
    def join(
        cls,
        topology: Topology,
        device: Device,
        *,
        timeout_minutes: float,
        place: RankPlace | None = None,
    ) -> Parallel:
        """Enter the process groups; returns when all ranks have.

        Args:
            topology: the grid.
            device: decides what the groups travel over.
            timeout_minutes: the limit of every group but `persist`.
            place: of this rank; None: a world of one.
        """
        with _lock:
            if not _members:
                _initialize(topology, device, timeout_minutes, place)
                joined = _describe(cls, topology)
                _connect(joined, device)
                _check_limits(joined.group_limits_s, timeout_minutes)
            else:
                joined = _members[0]
                _check_same(joined, topology, timeout_minutes, place)
            _members.append(joined)
        return joined

    def leave(self, *, together: bool = False) -> None:
        """Leave the groups; the last member of the process ends them.

        Args:
            together: all ranks leave now, so that each can wait for the others. NCCL needs that: a communicator that
                ends while a neighbour still uses it holds up the exit of both.
        """
        with _lock:
            _members.remove(self)
            if not _members:
                _end_groups(together=together and self.world_size > 1)


def _initialize(
    topology: Topology, device: Device, timeout_minutes: float, place: RankPlace | None
) -> None:
    limit = timedelta(minutes=timeout_minutes)
    if place is None:
        # An in-memory store: a world of one needs no port, so nothing can be in use or be reached from outside.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        # Nothing is exchanged in it, on no device: gloo takes no memory of a GPU, and no time.
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    else:
        dist.init_process_group(
            device.collectives,
            init_method=place.rendezvous,
            rank=place.rank,
            world_size=place.world_size,
            timeout=limit,
            # No device_id: NCCL would then connect each of Megatron's dozen groups at once, used or not, and each
            # connection takes memory of the GPU. `_connect` does it for those that are used.
        )
    assert dist.get_world_size() == topology.world_size, (
        f"{dist.get_world_size()} ranks met; the definition's layout has {topology.world_size}"
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        context_parallel_size=topology.cp,
        distributed_timeout_minutes=timeout_minutes,  # pyright: ignore[reportArgumentType] - goes to timedelta
        create_gloo_process_groups=False,
    )
    # The no-op tracker: the stock one needs CUDA, and nothing is drawn at random while dropout is 0.
    get_cuda_rng_tracker(inference_rng_tracker=True)


def _connect(parallel: Parallel, device: Device) -> None:
    """Have NCCL connect the groups that are used, so that what is wrong between GPUs shows at start and not in a step."""
    if not device.is_cuda:
        return  # gloo connects when a group is made
    for axis in (parallel.world, parallel.tp, parallel.cp, parallel.dp, parallel.dp_cp):
        met = sum_in_place(torch.ones(1, device=device.torch_device), axis)
        assert met.item() == axis.size, f"{met.item():g} of {axis.size} ranks met along {axis.name}"


def _end_groups(*, together: bool) -> None:
    if together and dist.get_backend() == "nccl":
        dist.barrier(device_ids=[torch.cuda.current_device()])
    parallel_state.destroy_model_parallel()
    world = dist.group.WORLD
    # The newest first: groups over some ranks end before the one over all, which others may be made from.
    for group in reversed(list(dist.distributed_c10d._world.pg_map)):  # no public list of them
        if group is not world:
            dist.destroy_process_group(group)
    dist.destroy_process_group()


def _describe(kind: type[Parallel], topology: Topology) -> Parallel:
    world = dist.get_world_size()
    persist = None
    if world > 1:
        # Always gloo: what is published lies in the host's memory, and a training collective must not be waited for.
        persist = cast(
            dist.ProcessGroup,
            dist.new_group(
                backend="gloo", timeout=timedelta(seconds=PERSIST_TIMEOUT_S), group_desc=PERSIST
            ),
        )
    return kind(
        rank=dist.get_rank(),
        world_size=world,
        topology=topology,
        tp=_axis("tp", parallel_state.get_tensor_model_parallel_group()),
        cp=_axis("cp", parallel_state.get_context_parallel_group()),
        dp=_axis("dp", parallel_state.get_data_parallel_group()),
        dp_cp=_axis("dp x cp", parallel_state.get_data_parallel_group(with_context_parallel=True)),
        world=_axis("world", cast(dist.ProcessGroup, dist.group.WORLD)),
        persist=persist,
        group_limits_s=_limits(),
    )


def _axis(name: str, group: Any) -> Axis:  # noqa: ANN401 - Megatron does not type its groups
    return Axis(name=name, rank=group.rank(), size=group.size(), group=group)


def _limits() -> Mapping[str, float]:
    """Read the limit of every group of this process back from its backend."""
    limits: dict[str, float] = {}
    for group in list(dist.distributed_c10d._world.pg_map):  # no public list of them
        name = group.group_desc if group.group_desc not in limits else group.group_name
        for backend in {group._get_backend(kind) for kind in group._device_types}:  # nor of limits
            limits[name] = backend.options._timeout.total_seconds()
    return limits


def _check_limits(group_limits_s: Mapping[str, float], timeout_minutes: float) -> None:
    """A group that kept its default would hang for half an hour, or end a long step."""
    wanted = dict.fromkeys(group_limits_s, 60 * timeout_minutes)
    if PERSIST in wanted:
        wanted[PERSIST] = PERSIST_TIMEOUT_S
    for name, limit_s in group_limits_s.items():
        # The group keeps whole milliseconds.
        assert abs(limit_s - wanted[name]) <= 1e-3, (
            f"the group {name} has a limit of {limit_s} s; it was made with {wanted[name]} s"
        )


def _check_same(
    joined: Parallel, topology: Topology, timeout_minutes: float, place: RankPlace | None
) -> None:
    rank, world_size = (0, 1) if place is None else (place.rank, place.world_size)
    grid, held = ((one.tp, one.cp, one.dp) for one in (topology, joined.topology))
    same = (joined.rank, joined.world_size, held) == (rank, world_size, grid)
    _check_limits(joined.group_limits_s, timeout_minutes)
    assert same, (
        f"this process already is rank {joined.rank} of tp, cp, dp {held}; it cannot also be rank {rank} of {grid}"
    )
