"""Clock: the time of day in milliseconds, as manifests and marks have it."""

from __future__ import annotations

import time


def unix_ms() -> int:
    """Now."""
    return time.time_ns() // 1_000_000
