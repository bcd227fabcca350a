"""GPUs that a definition can name: memory and price, for the planner and for what a deployment costs.

Memory is what CUDA reports of the card, in 10^9 bytes (an H200 reports 139.8 GiB). Prices are assumptions for estimates,
noted in 2026-09 from a provider's public list; only the H200's was also seen in a published account of a run's cost.
`lilo plan --usd-per-gpu-hour` takes yours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

GpuName: TypeAlias = Literal["A100-80GB", "H100", "H200", "B200"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: GpuName
    memory_bytes: float
    """All of it; the planner leaves a margin (`planner/memory.py`)."""
    usd_per_s: float
    """Modal's list price of one GPU for one second as noted in 2026-09: an assumption, not a quotation."""
    speed: float
    """Dense bf16 speed relative to an H200's, by data sheet; the planner's measured rates are of an H200."""

    @property
    def usd_per_hour(self) -> float:
        """Price of one GPU for one hour."""
        return self.usd_per_s * 3600


GPUS: Mapping[GpuName, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu(name="A100-80GB", memory_bytes=85.1e9, usd_per_s=0.000694, speed=0.315),
            Gpu(name="H100", memory_bytes=85.0e9, usd_per_s=0.001097, speed=1.0),
            Gpu(name="H200", memory_bytes=150.1e9, usd_per_s=0.001261, speed=1.0),
            Gpu(name="B200", memory_bytes=191.5e9, usd_per_s=0.001736, speed=2.27),
        )
    }
)
"""By name. Speeds: 312, 989, 989 and 2,250 TFLOP/s dense bf16 in the vendor's data sheets."""


BF16_FLOPS_PER_S = 989e12
"""Dense bf16 operations a second of an H200, whose `speed` is 1, by data sheet."""

_REPORTED_NAMES: Mapping[str, GpuName] = MappingProxyType(
    {
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA A100 80GB PCIe": "A100-80GB",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA B200": "B200",
    }
)
"""As CUDA reports them; variants of these with other clocks have other names and are not known."""


def bf16_flops_per_s(reported_name: str) -> float | None:
    """Dense bf16 operations a second of a device by the name that it reports; None: not known."""
    name = _REPORTED_NAMES.get(reported_name)
    return None if name is None else BF16_FLOPS_PER_S * GPUS[name].speed
