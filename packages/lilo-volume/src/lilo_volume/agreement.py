"""Agreement: what rank 0 decides, every rank gets: the same value, or the same error.

All ranks run through the same collectives on every path, so that an error on one never leaves others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from lilo_volume.errors import RankFailed, VolumeError
from lilo_volume.group import Group

T = TypeVar("T")


def decided_by_rank_zero(
    group: Group, action: Callable[[], T], *, label: str, node: str, timeout_s: float, step: str
) -> T:
    """Run `action` on rank 0 and return its value on every rank.

    Raises:
        VolumeError: what `action` raised, on every rank; any other error of it becomes `RankFailed`.
        GroupTimeout: a rank did not come.
    """
    outcome: tuple[T | None, VolumeError | None] | None = None
    cause: BaseException | None = None
    if group.rank == 0:
        try:
            outcome = (action(), None)
        except VolumeError as error:
            outcome = (None, error)
        except Exception as error:
            cause = error
            text = f"{type(error).__name__}: {error}"
            outcome = (None, RankFailed(label, 0, node, text))
    value, failure = group.broadcast(outcome, timeout_s=timeout_s, step=step)
    if failure is None:
        return cast("T", value)
    if cause is not None:
        raise failure from cause
    raise failure
