"""Sweep: every named step x every rank x every action x settings, on the emulator, against the invariants.

report = sweep(in_place, pairwise_settings())
assert report.violations == ()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lilo_volume.testing.emulator.modes import Modes
from lilo_volume.testing.sweep.case import Case, Setting, cases
from lilo_volume.testing.sweep.protocols import Saving
from lilo_volume.testing.sweep.world import (
    Violation,
    World,
    old_checkpoint,
    run_case,
    temporary_folder,
)

Steps = Mapping[int, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep found."""

    runs: int
    steps: tuple[str, ...]
    """Every step that was failed."""
    violations: tuple[Violation, ...]

    @property
    def broken(self) -> tuple[str, ...]:
        """Numbers of the invariants that did not hold."""
        return tuple(sorted({violation.invariant for violation in self.violations}))


def sweep(
    saving: Saving,
    settings: Iterable[Setting],
    *,
    until: str | None = None,
    on_run: Callable[[int], None] | None = None,
) -> SweepReport:
    """Run every case of every setting.

    Args:
        saving: what each rank does.
        settings: modes and circumstances.
        until: end once this invariant was seen broken: enough to know that a protocol is broken.
        on_run: told the number of each run.
    """
    old = old_checkpoint(saving)
    steps = {same: named_steps(saving, old, same_name=same) for same in (False, True)}
    runs, names, violations = 0, dict[str, None](), list[Violation]()
    for setting in settings:
        for case in cases(setting, *steps[setting.same_name]):
            runs += 1
            if on_run is not None:
                on_run(runs)
            names[case.step] = None
            violations += run_case(saving, case, old)
            if until is not None and any(v.invariant == until for v in violations):
                return _report(runs, names, violations)
    return _report(runs, names, violations)


def named_steps(saving: Saving, old: dict[str, bytes], *, same_name: bool) -> tuple[Steps, Steps]:
    """The steps of each rank when nothing fails, and those that only come after a refusal."""
    setting = Setting(
        modes=Modes(), ending="stay", same_name=same_name, open_reader=False, times=None
    )
    refusal = Case(setting=setting, rank=0, step="check", action="raise")
    found: list[dict[int, list[str]]] = []
    for case in (None, refusal):
        with temporary_folder() as folder:
            world = World(saving, setting, folder, old)
            world.save(case)
            found.append({rank: list(dict.fromkeys(seen)) for rank, seen in world.seen.items()})
    steps, refused = found
    clean_up = {rank: [s for s in seen if s not in steps[rank]] for rank, seen in refused.items()}
    return steps, clean_up


def _report(runs: int, names: Iterable[str], violations: Iterable[Violation]) -> SweepReport:
    return SweepReport(runs=runs, steps=tuple(names), violations=tuple(violations))
