"""Supervisor: keeps a trainer running: starts it, counts epochs, starts it again when it is lost, and gives up.

Knows nothing of models or operations: `engine.py` runs its lanes over what `start` returns and says `lost` after.
"""

from __future__ import annotations

import logging

import anyio

from lilo_engine.commands.launcher import Launcher, RunningBackend
from lilo_engine.errors import LiloError

_log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 4
"""Starts in a row that may fail before it gives up; the first start of all is not tried again."""
FIRST_PAUSE_S = 0.5
"""Between a failed start and the next; doubles each time."""
SHORT_LIFE_S = 30.0
"""A trainer lost sooner, without having held a model, counts as a failed start: it would be lost again and again."""


class Supervisor:
    """One trainer at a time."""

    def __init__(self, launcher: Launcher, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.epoch = 0
        self.last_failure: str | None = None
        self._launcher = launcher
        self._first_pause_s = first_pause_s
        self._failures = 0
        self._started_s = 0.0

    async def start(self) -> RunningBackend | None:
        """A trainer of the next epoch; None when it gave up, with the cause in `last_failure`."""
        while self._failures <= MAX_FAILED_STARTS:
            if self._failures:
                pause_s = self._first_pause_s * 2 ** (self._failures - 1)
                _log.warning("starting the trainer again in %.1f s", pause_s)
                await anyio.sleep(pause_s)
            self.epoch += 1
            try:
                running = await self._launcher.start(self.epoch)
            except LiloError as error:
                self.last_failure = error.message
                self._failures += 1
                _log.error("epoch %d: %s", self.epoch, error.message)
                if self.epoch == 1:
                    break
                continue
            self._started_s = anyio.current_time()
            _log.info("epoch %d: the trainer is up", self.epoch)
            return running
        _log.error("the trainer is given up after %d failures", self._failures)
        return None

    def lost(self, cause: str, *, useful: bool) -> None:
        """The trainer that `start` returned is gone; `useful` tells whether it held any model."""
        self.last_failure = cause
        lived_s = anyio.current_time() - self._started_s
        self._failures = 0 if useful or lived_s >= SHORT_LIFE_S else self._failures + 1
        _log.error("epoch %d: the trainer is lost after %.1f s: %s", self.epoch, lived_s, cause)
