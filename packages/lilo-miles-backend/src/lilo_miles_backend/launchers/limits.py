"""DriverLimits: how long the driver waits for its ranks, and the words that name each limit. Pure.

The engine waits for the driver with the same limits (`lilo_engine/commands/bridge.py`). The driver's run out a little
earlier, so that what reaches the client are the words of the one who knows which rank is late.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_definitions import Limits
from lilo_engine.commands.bridge import command_limit

from lilo_miles_backend.rank_commands import RunBatch

EARLIER_S = 3.0
"""Enough to gather evidence, end all ranks and send the answer."""
EARLIER_PART = 0.25
"""At most this part of a limit is given up for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLimits:
    """Waits of one driver."""

    limits: Limits
    silence_s: float
    """For news of progress from a rank that has a command."""
    close_s: float = 1.0
    """For the ranks to leave their groups; the engine gives the driver 2 s."""

    def begin(self) -> tuple[float, str]:
        """For all ranks to start and load, and that limit in words."""
        return self._earlier(*command_limit("describe", (), self.limits))

    def command(self, command: object) -> tuple[float, str]:
        """For a command, and that limit in words; it scales with the tokens."""
        batch = (command.batch,) if isinstance(command, RunBatch) else ()
        return self._earlier(*command_limit("forward_backward", batch, self.limits))

    def _earlier(self, limit_s: float, words: str) -> tuple[float, str]:
        less_s = min(EARLIER_S, EARLIER_PART * limit_s)
        return limit_s - less_s, f"{words} (less {less_s:g} s for telling)"


def command_words(command: object) -> str:
    """A command by its name."""
    return type(command).__name__
