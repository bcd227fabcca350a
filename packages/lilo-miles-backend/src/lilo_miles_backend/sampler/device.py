"""Where the sampler computes, and how much of a GPU it may take for the memory of its rows.

It is a process beside the trainer's ranks and shares the first GPU with one of them. Both know from the definition how
much the sampler takes (`lilo_definitions.planner.sampler_memory`), so neither has to ask the other.
"""

from __future__ import annotations

import logging

import torch
from lilo_definitions import Definition
from lilo_definitions.planner import SamplerMemory, sampler_memory
from lilo_definitions.planner.sampler import WORKING_BYTES

from lilo_miles_backend.ranks.device import Device

_log = logging.getLogger(__name__)


def choose_device(definition: Definition, *, threads: int) -> torch.device:
    """The CPU, or the first GPU.

    Raises:
        InvalidRequest: the definition asks for a GPU and there is none.
    """
    device = Device.of(definition.topology, threads=threads, local_rank=0, num_devices=1)
    return device.torch_device


def cache_limit(definition: Definition, device: torch.device) -> int | None:
    """Bytes that keys, values and states may take once the weights are there; None on CPU, where rows alone count.

    Less than the share that the definition gives where less is free: another process is on this GPU then, and long
    sequences wait for each other or fail by themselves.
    """
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = sampler_memory(definition, device_bytes=total)
    assert share is not None, "an embedded sampler on a GPU has a share of it"
    limit = limit_of(share, free)
    whole = share.row_bytes + definition.context * share.token_bytes
    _log.info(
        "the weights are on %s, %.1f GB are free; the cache of keys, values and states may take %.1f GB: "
        "%d sequences of %d tokens, more of shorter ones",
        torch.cuda.get_device_name(device),
        free / 1e9,
        limit / 1e9,
        limit // whole,
        definition.context,
    )
    if limit < 2 * whole:
        _log.warning(
            "%.1f GB are free on the sampler's GPU and two whole sequences need %.1f GB beside %.1f GB to work in; "
            "requests near the context of %d tokens may fail",
            free / 1e9,
            2 * whole / 1e9,
            WORKING_BYTES / 1e9,
            definition.context,
        )
    return limit


def limit_of(share: SamplerMemory, free_bytes: float) -> int:
    """The share's cache, or what is free beside adapters and room to work in, if that is less."""
    return int(max(0, min(share.cache, free_bytes - share.adapters - WORKING_BYTES)))
