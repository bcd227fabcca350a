"""Bridge: what its two sides agree on: the message, the lanes of connections, the limits. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from lilo_definitions import Limits

from lilo_engine.commands import frames
from lilo_engine.commands.command import Batch

Channel: TypeAlias = Literal["gpu", "persist", "fetch", "health"]
"""Which connection a command takes: one for the GPU lane, one per persist worker, one for loads that are prepared, one
for health."""

CHANNELS: tuple[Channel, ...] = get_args(Channel)

CHANNEL_OF: Mapping[str, Channel] = {
    "describe": "gpu",
    "create_adapter": "gpu",
    "forward_backward": "gpu",
    "optim_step": "gpu",
    "capture": "gpu",
    "persist": "persist",
    "prepare_load": "fetch",
    "load": "gpu",
    "drop_gradients": "gpu",
    "unload": "gpu",
    "health": "health",
    "close": "gpu",
}
"""Every command of the Backend protocol; nothing else can be called."""

HEALTH_LIMIT_S = 2.0
"""Health is answered beside the work; a trainer that holds its interpreter for long answers late, and is not lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One call of a Backend method."""

    method: str
    epoch: int
    """Of the trainer group it is meant for."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the method returned; a LiloError comes in its place when it raised."""

    value: Any


frames.register(Command, Reply)


def connections(publication_workers: int) -> dict[Channel, int]:
    """How many connections each channel has."""
    return {"gpu": 1, "persist": 1 + publication_workers, "fetch": 1, "health": 1}


def command_limit(method: str, args: tuple[Any, ...], limits: Limits) -> tuple[float, str]:
    """Seconds that a command may take, and that limit in words."""
    if method == "describe":
        limit = limits.startup_timeout_s
        return limit, f"limits.startup_timeout_s of {limit:g} s"
    limit = limits.command_timeout_s
    words = f"limits.command_timeout_s of {limit:g} s"
    tokens = _num_tokens(args)
    if tokens == 0:
        return limit, words
    limit += tokens * limits.command_s_per_token
    return limit, f"{words} + {tokens} tokens x limits.command_s_per_token = {limit:g} s"


def _num_tokens(args: tuple[Any, ...]) -> int:
    if not args or not isinstance(args[0], Batch):
        return 0
    return sum(datum.num_tokens for item in args[0].items for datum in item.datums)
