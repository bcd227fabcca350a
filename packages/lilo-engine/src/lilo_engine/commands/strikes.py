"""Strikes: when a trainer that has not answered is taken for lost. Pure; times are arguments.

A limit says how long it may go without getting on, not how long it may take: a slow step that moves is never given
up. Only when the limit ran out since it last got on, and another look a while later finds that it still has not, is
it given up: one look alone may have come when its host was busy.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_STRIKES = 2
"""Looks in a row without progress."""
LOOK_SHARE = 0.25
"""Between two of them, as a share of the limit ..."""
MAX_LOOK_S = 30.0
"""... up to this."""


@dataclass(slots=True)
class Strikes:
    """One wait for one answer."""

    limit_s: float
    since_s: float
    """When it last got on; at first, when it was asked."""
    count: int = 0
    """Looks without progress since then."""

    def until_look_s(self, now_s: float) -> float:
        """How long to wait for the answer before the next look."""
        pause_s = min(self.limit_s * LOOK_SHARE, MAX_LOOK_S)
        return max(self.since_s + self.limit_s + self.count * pause_s - now_s, 0.0)

    def look(self, now_s: float, still_s: float | None) -> bool:
        """One look; whether it is to be given up.

        Args:
            now_s: seconds, of the clock of `since_s`.
            still_s: how long ago it says that it last got on; None = it did not say.
        """
        if still_s is not None and now_s - still_s > self.since_s:
            self.since_s = now_s - still_s
            self.count = 0
        if now_s - self.since_s < self.limit_s:
            return False
        self.count += 1
        return self.count >= MAX_STRIKES
