"""Parallel: who this rank is in the grid of ranks. The only file that asks Megatron or torch.distributed.

The process groups belong to the process: torch and Megatron keep them in module globals. Ranks that share a
process (several in-process trainers, as in tests) therefore share one membership, which the last one to leave ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from lilo_definitions import Topology

from lilo_miles_backend.ranks.device import Device
from lilo_miles_backend.ranks.megatron import get_cuda_rng_tracker, parallel_state

_lock = threading.Lock()
_members: list[Parallel] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This rank's place."""

    rank: int
    world_size: int
    topology: Topology
    timeout_minutes: float

    @classmethod
    def join(cls, topology: Topology, device: Device, *, timeout_minutes: float) -> Parallel:
        """Enter the process groups of a world of one; each gets `timeout_minutes` as its limit."""
        wanted = cls(
            rank=0,
            world_size=topology.world_size,
            topology=topology,
            timeout_minutes=timeout_minutes,
        )
        with _lock:
            if not _members:
                _initialize(topology, device, timeout_minutes)
                _check_timeouts(device, timeout_minutes)
            held = _members[0] if _members else wanted
            assert held == wanted, (
                f"this process already is a rank of {held}; it cannot also be one of {wanted}"
            )
            _members.append(wanted)
        return wanted

    def leave(self) -> None:
        """Leave the groups; the last member of the process ends them."""
        with _lock:
            _members.remove(self)
            if not _members:
                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()


def _initialize(topology: Topology, device: Device, timeout_minutes: float) -> None:
    # An in-memory store: a world of one needs no port, so nothing can be in use or be reached from outside.
    dist.init_process_group(
        device.collectives,
        store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        rank=0,
        world_size=1,
        timeout=timedelta(minutes=timeout_minutes),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        context_parallel_size=topology.cp,
        distributed_timeout_minutes=timeout_minutes,  # pyright: ignore[reportArgumentType] - goes to timedelta
        create_gloo_process_groups=False,
    )
    # The no-op tracker: the stock one needs CUDA, and nothing is drawn at random while dropout is 0.
    get_cuda_rng_tracker(inference_rng_tracker=True)


def _check_timeouts(device: Device, timeout_minutes: float) -> None:
    """Read back the limit of every kind of group: one that kept the default would hang for half an hour."""
    wanted = timedelta(minutes=timeout_minutes)
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp x cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "world": dist.group.WORLD,
    }
    for name, group in groups.items():
        found = group._get_backend(device.torch_device).options._timeout  # no public way to ask
        assert found == wanted, (
            f"the {name} group has a limit of {found}; the definition says {wanted}"
        )
