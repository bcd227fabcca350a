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
        value, failure, cause = _attempted(action, group, label, node)
        outcome = (value, failure)
    value, failure = group.broadcast(outcome, timeout_s=timeout_s, step=step)
    if failure is not None:
        raise failure from cause
    return cast("T", value)


def done_by_every_rank(
    group: Group, action: Callable[[], T], *, label: str, node: str, timeout_s: float, step: str
) -> list[T]:
    """Run `action` on every rank and return all values, in rank order, on every rank.

    Raises:
        VolumeError: the error of the lowest rank that had one, on every rank; one that is not ours becomes
            `RankFailed`, which names the rank.
        GroupTimeout: a rank did not come.
    """
    value, failure, cause = _attempted(action, group, label, node)
    outcomes = group.all_gather((value, failure), timeout_s=timeout_s, step=step)
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            raise error from (cause if rank == group.rank else None)
    return [cast("T", value) for value, _ in outcomes]


def _attempted(
    action: Callable[[], T], group: Group, label: str, node: str
) -> tuple[T | None, VolumeError | None, BaseException | None]:
    """Value, error to share, and what it was made from."""
    try:
        return action(), None, None
    except VolumeError as error:
        # Errors of the medium do not say who met them.
        error.add_note(f"at rank {group.rank} on node {node}")
        return None, error, error.__cause__
    except Exception as error:
        return None, RankFailed(label, group.rank, node, f"{type(error).__name__}: {error}"), error
