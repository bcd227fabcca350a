"""Open files: which files below a folder are open, in any process of this machine, and how. Linux only.

Where there is no `/proc`, nothing is ever seen as open, and a reload is never refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One open file, or a working directory inside."""

    path: str
    """Relative to the folder; empty for the folder itself."""
    writing: bool
    process: int
    command: str
    is_cwd: bool


def open_files(folder: str, *, all_processes: bool) -> list[OpenFile]:
    """What is open below `folder`; of this process only, unless `all_processes`."""
    found: list[OpenFile] = []
    for process in _processes() if all_processes else [os.getpid()]:
        for place, writing, is_cwd in _of(process):
            if place == folder or place.startswith(f"{folder}/"):
                path = place[len(folder) + 1 :].removesuffix(" (deleted)")
                found.append(OpenFile(path, writing, process, _command(process), is_cwd))
    return found


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _of(process: int) -> Iterator[tuple[str, bool, bool]]:
    with contextlib.suppress(OSError):
        yield os.readlink(f"/proc/{process}/cwd"), False, True
    try:
        descriptors = os.listdir(f"/proc/{process}/fd")
    except OSError:
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            place = os.readlink(f"/proc/{process}/fd/{descriptor}")
            if place.startswith("/"):
                yield place, _writes(process, descriptor), False


def _writes(process: int, descriptor: str) -> bool:
    try:
        with open(f"/proc/{process}/fdinfo/{descriptor}", encoding="ascii") as file:
            flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    except (OSError, StopIteration):
        return False
    return flags & _ACCESS != os.O_RDONLY


def _command(process: int) -> str:
    try:
        with open(f"/proc/{process}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"
