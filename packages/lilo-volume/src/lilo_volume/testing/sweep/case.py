"""Case: one run of the crash sweep: where which rank fails and how, and what the volume is like meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, TypeAlias

from lilo_volume.faults import ACTIONS, Action, Fault
from lilo_volume.testing.emulator.modes import SWEPT, Modes, every, pairwise

WORLD_SIZE = 4
NODES = ("n0", "n0", "n1", "n1")
"""Node of each rank: two nodes of two ranks."""

Ending: TypeAlias = Literal["crash", "exit", "stay"]
"""What becomes of the containers after the fault: lost, ended in order (which commits), or used again."""

_CIRCUMSTANCES: Mapping[str, Sequence[Any]] = {
    "ending": ("crash", "exit", "stay"),
    "same_name": (False, True),
    "open_reader": (False, True),
    "times": (None, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about a run but the fault."""

    modes: Modes
    ending: Ending
    same_name: bool
    """Whether the new checkpoint overwrites the old one, or has a name of its own."""
    open_reader: bool
    """Whether a file of the old checkpoint is open in rank 0's container all the time."""
    times: int | None
    """How often the step fails; None: each time it is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setting and a fault."""

    setting: Setting
    rank: int
    step: str
    action: Action
    refused_before: bool = False
    """Whether rank 0 refuses the publication first: for the steps that clean up."""

    def faults(self, rank: int) -> tuple[Fault, ...]:
        """What happens to a rank."""
        faults: list[Fault] = []
        if self.refused_before and rank == 0:
            faults.append(Fault(step="check", action="raise"))
        if rank == self.rank:
            times = self.setting.times
            faults.append(Fault(step=self.step, action=self.action, times=times))
        return tuple(faults)

    def __str__(self) -> str:
        kind = {name: getattr(self.setting.modes, name) for name in SWEPT}
        modes = ", ".join(f"{name}={value}" for name, value in kind.items())
        setting = self.setting
        return (
            f"{self.action} at {self.step!r} of rank {self.rank} ({modes}; ending={setting.ending}, "
            f"same_name={setting.same_name}, open_reader={setting.open_reader}, times={setting.times})"
        )


def pairwise_settings() -> list[Setting]:
    """Few settings, in which every two values of modes meet; circumstances go around."""
    circumstances = cycle(pairwise(_CIRCUMSTANCES))
    return [_setting({**row, **next(circumstances)}) for row in pairwise(SWEPT)]


def all_settings() -> list[Setting]:
    """Every combination of modes; circumstances go around, so that each meets each value of each mode."""
    circumstances = cycle(pairwise(_CIRCUMSTANCES))
    return [_setting({**row, **next(circumstances)}) for row in every(SWEPT)]


def cases(
    setting: Setting, steps: Mapping[int, Sequence[str]], clean_up: Mapping[int, Sequence[str]]
) -> Iterator[Case]:
    """Every step of every rank with every action; `clean_up` has the steps that only come after a refusal."""
    for refused, of_ranks in ((False, steps), (True, clean_up)):
        for rank, names in of_ranks.items():
            for step in names:
                for action in ACTIONS:
                    yield Case(
                        setting=setting, rank=rank, step=step, action=action, refused_before=refused
                    )


def _setting(row: Mapping[str, Any]) -> Setting:
    modes = Modes(**{name: row[name] for name in SWEPT}, commit_order="shuffled", seed=1)
    return Setting(modes=modes, **{name: row[name] for name in _CIRCUMSTANCES})
