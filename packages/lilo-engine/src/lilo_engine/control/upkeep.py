"""Upkeep: what a front without an engine does now and then: write down whom it heard of, and look at what others changed.

In the engine's process the sweeper does the same (`sweeper.py`), and ends what is over besides.
"""

from __future__ import annotations

import logging

import anyio

from lilo_engine.control.control import Control
from lilo_engine.errors import LiloError

_log = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""How late a front may know that a session was ended or a key revoked through another one; far below the 300 s after
which a session counts as silent."""


class Upkeep:
    """Of one front's control plane."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def run(self) -> None:
        """Keep up until cancelled."""
        while True:
            await anyio.sleep(INTERVAL_S)
            await self.once()

    async def once(self) -> None:
        """Write and read once; what failed is tried again the next time."""
        control = self._control
        try:
            await control.sessions.flush()
            await control.runs.flush()
            await control.keys.look_again(control.clock())
            control.sampling_sessions.look_again()
        except LiloError as error:
            _log.warning("the records were not kept up: %s", error)
