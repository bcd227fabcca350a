"""Emulator: a volume that shows each container its own view, on one machine: in one process, or across several.

    emulator = Emulator(folder, modes=Modes(commit_reload="on"))
    a, b = emulator.mount("a"), emulator.mount("b")      # two "nodes"
    volume = emulator.volume(a)                          # what rank code on node a is given

With `shared=True` all of it lies in `folder` as files, and every process that opens the same folder is part of it:
`Emulator(folder, shared=True).attach(task_id)` acts for a container that another process mounted.
"""

from __future__ import annotations

import os
from pathlib import Path

from lilo_volume.errors import VolumeUnavailable
from lilo_volume.testing.emulator.container import Container
from lilo_volume.testing.emulator.medium import FolderMedium, MemoryMedium
from lilo_volume.testing.emulator.modes import Modes
from lilo_volume.testing.emulator.server import Server
from lilo_volume.testing.emulator.volume import EmulatedVolume, OutsideVolume

_DIRECTORY = "containers"


class Emulator:
    """One volume and the containers that mount it."""

    def __init__(self, folder: Path, *, modes: Modes | None = None, shared: bool = False) -> None:
        """Emulate below `folder`; views are always folders there.

        Args:
            folder: made if it is not there.
            modes: how the volume behaves; all processes must give the same ones.
            shared: keep everything in `folder`, so that other processes can take part.
        """
        self.modes = modes or Modes()
        self._folder = folder
        self._shared = shared
        self._medium = FolderMedium(folder / "store") if shared else MemoryMedium()
        (folder / _DIRECTORY).mkdir(parents=True, exist_ok=True)
        with self._medium.locked("volume") as table:
            table.setdefault("id", 0)
        self.server = self._server()

    def mount(
        self, name: str = "ta", *, lag_s: float = 0.0, modes: Modes | None = None
    ) -> Container:
        """Start a container; its identity is new each time (R22). `modes` are for this container alone."""
        task_id = f"{name}-{os.urandom(4).hex()}"
        with self._medium.locked(_DIRECTORY) as table:
            table[task_id] = [True, lag_s]
        container = self._container(task_id, lag_s, modes)
        container.mount()
        return container

    def attach(self, task_id: str) -> Container:
        """Act for a container that runs, from any process (R19).

        Raises:
            VolumeUnavailable: there is none of this identity.
        """
        with self._medium.locked(_DIRECTORY) as table:
            known = table.get(task_id)
        if known is None:
            raise VolumeUnavailable(
                f"there is no container {task_id!r}; the volume is not mounted here"
            )
        return self._container(task_id, known[1])

    def volume(self, container: Container) -> EmulatedVolume:
        """The volume as code inside `container` has it."""
        return EmulatedVolume(container, evict=self.evict, version=self.modes.version)

    def outside(self) -> OutsideVolume:
        """The volume as a client has it that mounts nothing."""
        return OutsideVolume(self.server, self._folder / "nowhere")

    def recreate(self) -> None:
        """Delete the volume and make a new one of the same name: who mounted the old one keeps it (R22)."""
        with self._medium.locked("volume") as table:
            table["id"] += 1
        self.server = self._server()

    def evict(self) -> None:
        """Views forget what was removed on the server, in the mode where cold reads fail."""
        if self.modes.cold_reads_fail and (paths := self.server.take_removed()):
            with self._medium.locked(_DIRECTORY) as table:
                running = dict(table)
            for task_id, (_, lag_s) in running.items():
                self._container(task_id, lag_s).forget(paths)

    def _server(self) -> Server:
        with self._medium.locked("volume") as table:
            return Server(self._medium, self.modes, str(table["id"]))

    def _container(self, task_id: str, lag_s: float, modes: Modes | None = None) -> Container:
        return Container(
            self._medium,
            self.server,
            modes or self.modes,
            task_id,
            self._folder / _DIRECTORY / task_id,
            shared=self._shared,
            lag_s=lag_s,
            evict=self.evict,
        )
