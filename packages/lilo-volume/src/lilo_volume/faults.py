"""Faults: stop, or fail, a rank at any named step of a publication, to see what becomes of it. Steps: `steps`.

    faults = Faults(Fault(step="commit manifest", action="stop"))
    begin(volume, group, ..., on_step=faults)

It is an observer of steps, so that the product has no code path of its own for tests. The names of all steps that
were taken are in `Faults.seen`.
"""

from __future__ import annotations

import fnmatch
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_volume.errors import VolumeUnavailable

Action: TypeAlias = Literal["stop", "raise", "fail_after"]
ACTIONS: tuple[Action, ...] = ("stop", "raise", "fail_after")


class Stopped(BaseException):
    """This rank ends here: nothing after it runs. Not an `Exception`, so that no error handling sees it."""


class InjectedFault(VolumeUnavailable):
    """The medium did not answer, because a `Fault` said so."""

    kind = "injected_fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens at a step."""

    step: str
    """Name of the step; `*` stands for anything, as in `create *`."""
    action: Action
    """`stop`: the rank ends before the step. `raise`: the step fails and does nothing. `fail_after`: the step is
    taken, and fails all the same, as when an answer is lost."""
    times: int | None = None
    """How often; None: each time the step is tried."""
    error: Callable[[str], Exception] = InjectedFault
    """Made from a text, for `raise` and `fail_after`."""


def stop_by_raising() -> None:
    """For ranks that are threads.

    Raises:
        Stopped: always.
    """
    raise Stopped


def kill_this_process() -> None:
    """For ranks that are processes: gone at once, as when the kernel runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def pause_this_process() -> None:
    """For ranks that are processes: alive, with its files and locks, but silent."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Faults:
    """An observer of one rank's steps that lets some of them fail."""

    def __init__(self, *faults: Fault, stop: Callable[[], None] = stop_by_raising) -> None:
        """Let each of `faults` happen; `stop` ends the rank."""
        self._left = {fault: fault.times for fault in faults}
        self._stop = stop
        self._stopped = False
        self.seen: list[str] = []
        """Every step, each time it was begun."""
        self.struck: list[str] = []
        """The steps at which a fault happened."""

    def before(self, step: str) -> None:
        """Stop or raise, if a fault says so; who has stopped stops again at whatever it would do to clean up."""
        if self._stopped:
            self._stop()
        self.seen.append(step)
        for fault in self._due(step, "stop"):
            self._strike(fault, step)
            self._stopped = True
            self._stop()
        for fault in self._due(step, "raise"):
            self._strike(fault, step)
            raise fault.error(f"fault before {step!r}")

    def after(self, step: str) -> None:
        """Fail although the step was taken, if a fault says so."""
        for fault in self._due(step, "fail_after"):
            self._strike(fault, step)
            raise fault.error(f"fault after {step!r}")

    def _due(self, step: str, action: Action) -> list[Fault]:
        return [
            fault
            for fault, left in self._left.items()
            if fault.action == action and left != 0 and fnmatch.fnmatchcase(step, fault.step)
        ]

    def _strike(self, fault: Fault, step: str) -> None:
        self.struck.append(step)
        left = self._left[fault]
        self._left[fault] = None if left is None else left - 1
