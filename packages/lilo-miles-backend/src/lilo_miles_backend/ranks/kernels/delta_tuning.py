# pyright: reportMissingImports=false
"""One configuration for each of fla's kernels, in place of trying all of them on first use.

Trying takes minutes, again for each size and dtype, and what it chooses differs from start to start. What is here is from
each kernel's own list: for heads of 128 on a Hopper GPU, and few long rows, whose states are the only sequential part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from triton.runtime.autotuner import Autotuner, Config

WARPS, STAGES = 4, 2
"""Of kernels that are not named; more stages may not fit a processor's shared memory, and nothing else is tried."""

WANTED: Mapping[str, Mapping[str, int]] = {
    "l2norm_fwd_kernel": {"BT": 32},
    "l2norm_bwd_kernel": {"BT": 32},
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK": 64, "num_warps": 2},
    # Narrow blocks of the state: one row has heads x V / 32 of them, and a GPU has 132 processors.
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 32},
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {"BV": 32},
    "chunk_fwd_kernel_o": {"BK": 64, "BV": 64},
}
"""By kernel: sizes of its blocks, and warps and stages where they are not the usual ones."""


def fix_configurations() -> None:
    """Leave every kernel of fla that was imported one configuration."""
    for tuner in tuners():
        if len(tuner.configs) > 1:
            wanted = WANTED.get(tuner.base_fn.__name__, {})
            tuner.configs = [_nearest(tuner.configs, wanted)]


def tuners() -> Iterator[Any]:
    """The autotuner of each kernel of fla that was imported; some come more than once."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            found = (_tuner(value) for value in list(vars(module).values()))
            yield from (tuner for tuner in found if tuner is not None)


def _tuner(value: Any) -> Any:  # noqa: ANN401 - Triton's decorators are untyped
    """The autotuner inside a decorated kernel, if it is one."""
    for _ in range(4):
        if isinstance(value, Autotuner):
            return value
        value = getattr(value, "fn", None)
    return None


def _nearest(configs: list[Config], wanted: Mapping[str, int]) -> Config:
    def distance(config: Config) -> int:
        blocks = sum(
            abs(config.kwargs[name] - size)
            for name, size in wanted.items()
            if name in config.kwargs
        )
        warps = abs(config.num_warps - wanted.get("num_warps", WARPS))
        return 100 * blocks + 10 * warps + abs(config.num_stages - wanted.get("num_stages", STAGES))

    return min(configs, key=distance)
