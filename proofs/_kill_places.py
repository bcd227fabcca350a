"""Where the killed publishers of `_kill.py` publish to: a directory, or an emulated volume with a view per node."""

from __future__ import annotations

import random
from pathlib import Path

from lilo_volume.testing.emulator import Emulator, Modes
from lilo_volume.volume import Volume
from lilo_volume.volumes.local import LocalVolume

UNKIND = Modes(commit_atomic=False, open_write="prefix")
"""Commits appear path by path, with half of an open file. The other modes cost seconds a round; the sweep has them."""


class Directory:
    """Both nodes share one directory."""

    name = "directory"

    def __init__(self, folder: Path) -> None:
        self._root = folder / "directory"
        LocalVolume(self._root)

    def start_round(self, rng: random.Random) -> None:
        """Nothing to start."""

    def open(self, node: str) -> Volume:
        return LocalVolume(self._root)

    def holds_server(self, process: int) -> bool:
        return False


class Views:
    """Each node has its own view of an emulated volume; every round brings up new containers."""

    name = "views"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "views"
        self._emulator = self._emulated()
        self._containers = {
            name: self._emulator.mount(name) for name in ("node0", "node1", "reader", "gc")
        }

    def start_round(self, rng: random.Random) -> None:
        for node in ("node0", "node1"):
            old = self._containers[node]
            # A node that goes down loses what it did not commit; one that ends in order commits it.
            (old.crash if rng.random() < 0.5 else old.exit)()
            self._containers[node] = self._emulator.mount(node)

    def open(self, node: str) -> Volume:
        # A handle of its own: locks of this process do not cross a fork.
        emulator = self._emulated()
        return emulator.volume(emulator.attach(self._containers[node].task_id))

    def _emulated(self) -> Emulator:
        return Emulator(self._folder, shared=True, modes=UNKIND)

    def holds_server(self, process: int) -> bool:
        """Whether a process is inside a call to the emulated server, which no real process can stop."""
        locks = {place.stat().st_ino for place in (self._folder / "store" / "locks").iterdir()}
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" in fields or fields[4] != str(process):
                continue
            if int(fields[5].rpartition(":")[2]) in locks:
                return True
        return False
