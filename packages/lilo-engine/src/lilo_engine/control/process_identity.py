"""ProcessIdentity: a process under a name that no other one ever has, and whether it is known to be dead.

Only a process of the same place (one start of one machine, one process namespace) can be looked for; of all others
nothing is known. The start time tells a process from a later one that got its number.
"""

from __future__ import annotations

import os
from pathlib import Path

_DEAD = ("Z", "X")
"""Has ended, and only waits for its parent to look."""


def process_identity(pid: int) -> str:
    """`place pid start` of a process of this machine; place and start are `-` where the system does not tell."""
    found = _state_and_start(pid)
    return f"{_place()} {pid} {'-' if found is None else found[1]}"


def is_dead(process: str) -> bool:
    """Whether the process of an identity is certainly over."""
    place, pid, start = process.split(" ")
    if "-" in (place, start) or place != _place():
        return False
    found = _state_and_start(int(pid))
    return found is None or found[0] in _DEAD or found[1] != start


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "-"


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """State and start time in clock ticks, fields 3 and 22 of proc(5); None: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The name before it may hold anything, parentheses too.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
