"""Steps: every action of a publication has a name, told to an observer before and after it, and may be tried again.

For progress, and for `faults`, which stops or fails a rank at any of them. In order, with who takes them:

    begin             every rank      says who it is
    look              rank 0          whether the name is taken; again before the manifest
    record            rank 0          makes the attempt's folder and the note in it
    commit record     rank 0          so that whatever is left behind later can be told from foreign files
    join              a rank per node sees the note in the committed state, and puts it into its own view
    probe             every rank      sees the note in its view: ranks of one node share one view
    create NAME       the writer      opens a file
    flush             every rank      makes the names of its files last
    report            every rank      tells what it wrote
    commit            a rank per node
    digest            every rank      copying mode only: reads what a framework wrote
    install own       rank 0          copying mode only: copies the files of its own node in its view
    commit own        rank 0          copying mode only
    copy peers        rank 0          copying mode only: the files of other nodes, server-side
    check             rank 0          reports against the expected set and the committed state
    remove source     rank 0          copying mode only: removes what was copied from the committed state
    manifest          rank 0          writes it into its view
    commit manifest   rank 0          from here on the checkpoint exists
    replace           rank 0          removes what is overwritten, once per attempt
    announce          rank 0          tells all others
    clear             a rank per node after a refusal only: removes the attempt from its view
    remove            rank 0          after a refusal only: removes it from the committed state
    clear source      a rank per node copying mode only: removes what was copied from its view
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from lilo_volume.errors import VolumeBusy, VolumeUnavailable
from lilo_volume.log import warn

T = TypeVar("T")
TRIES = 3
"""Every step may be repeated; more tries than this hide an outage."""
FIRST_DELAY_S = 0.001
"""Before the second try; a client of a remote medium does its own, longer ones."""
_DELAY_GROWTH = 4


@runtime_checkable
class StepObserver(Protocol):
    """Told of each step on both sides. What it raises counts as the step's own failure."""

    def before(self, step: str) -> None:
        """`step` is about to be taken."""
        ...

    def after(self, step: str) -> None:
        """`step` was taken."""
        ...


OnStep: TypeAlias = Callable[[str], None] | StepObserver
"""A plain function is told before each step only."""


@dataclass(frozen=True, slots=True)
class _Before:
    """A plain function as an observer."""

    before: Callable[[str], None]

    def after(self, step: str) -> None:
        """Nothing."""


class Steps:
    """Names what is done for an observer."""

    def __init__(self, observer: OnStep | None = None) -> None:
        """Tell `observer`, if there is one."""
        if observer is None or isinstance(observer, StepObserver):
            self._observer = observer
        else:
            self._observer = _Before(observer)

    @contextlib.contextmanager
    def named(self, step: str) -> Generator[None]:
        """Tell of `step` before and after the block."""
        if self._observer is not None:
            self._observer.before(step)
        yield
        if self._observer is not None:
            self._observer.after(step)

    def retried(self, step: str, action: Callable[[], T]) -> T:
        """Take `step`, again if the medium is busy or does not answer.

        Raises:
            VolumeBusy, VolumeUnavailable: each time; it may have been applied all the same.
        """
        delay_s = FIRST_DELAY_S
        for _ in range(TRIES - 1):
            try:
                with self.named(step):
                    return action()
            except (VolumeBusy, VolumeUnavailable) as error:
                warn("%s failed and is tried again in %s s: %s", step, delay_s, error)
            time.sleep(delay_s)
            delay_s *= _DELAY_GROWTH
        with self.named(step):
            return action()
