"""Threads: blocking backend calls beside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that a fence can end; on cancellation it is left behind instead of waited for.

    It takes no place in the shared thread limit: how many there are is bounded by the lanes, and a pass of forty
    minutes must not keep others from a thread.
    """
    return await anyio.to_thread.run_sync(
        partial(call, *args, **kwargs), abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
    )
