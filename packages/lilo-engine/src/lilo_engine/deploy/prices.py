"""Prices: what containers cost per hour, estimated from list prices. GPU prices are those of `lilo_definitions.GPUS`.

Assumptions, not a quotation: lists change, and regions, reservations and credits change what is paid. Every figure that is
shown carries the month in which the prices were noted.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_definitions import GPUS, GpuName

PRICES_OF = "2026-09"
"""Month in which the list prices were noted: of the GPUs (`lilo_definitions.GPUS`), and of cores and memory below."""
USD_PER_CORE_HOUR = 0.0000131 * 3600
"""One physical core; Modal's list is per second. With memory it is under a tenth of what GPUs cost."""
USD_PER_GIB_HOUR = 0.00000222 * 3600
"""One GiB of host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """US dollars per hour while a deployment runs."""

    trainer_usd: float
    """All nodes of one run."""
    sampler_min_usd: float
    """The pool at its smallest."""
    sampler_max_usd: float
    """The pool at its largest."""
    prices_of: str = PRICES_OF
    """Month of the price list."""

    @property
    def least_usd(self) -> float:
        """Trainer and the smallest pool."""
        return self.trainer_usd + self.sampler_min_usd

    @property
    def most_usd(self) -> float:
        """Trainer and the largest pool."""
        return self.trainer_usd + self.sampler_max_usd


def container_usd_per_hour(
    *, gpu: GpuName | None, num_gpus: int, cpus: float, memory_mib: int
) -> float:
    """One container for one hour."""
    gpus = GPUS[gpu].usd_per_hour * num_gpus if gpu is not None else 0.0
    return gpus + cpus * USD_PER_CORE_HOUR + memory_mib / 1024 * USD_PER_GIB_HOUR
