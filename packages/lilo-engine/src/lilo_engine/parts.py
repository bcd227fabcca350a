"""Parts: what servers are built from, chosen before anything runs; `app.py` puts them together."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lilo_definitions import Definition

from lilo_engine.commands.launcher import Launcher, ProcessLauncher
from lilo_engine.config import DataFolder
from lilo_engine.control.control import Control
from lilo_engine.control.lease import Lease
from lilo_engine.control.records import Records
from lilo_engine.control.sweeper import SweepSettings
from lilo_engine.remote.calls import Hello
from lilo_engine.remote.line import Line
from lilo_engine.requests.front import FrontSettings
from lilo_engine.sampling.launcher import ProcessSamplerLauncher, SamplerLauncher
from lilo_engine.storage import open_checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits of a server that no definition states."""

    front: FrontSettings = field(default_factory=FrontSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    drain_s: float = 5.0
    """For running commands and publications when the server stops; it has to be gone within 15 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server is built from."""

    definition: Definition
    data: DataFolder
    launcher: Launcher
    """How trainers are started."""
    sampler_launcher: SamplerLauncher
    """How sampling engines are started."""
    control: Control
    settings: ServerSettings = field(default_factory=ServerSettings)
    lease: Lease | None = None
    """Held on the records; renewed while the app runs. None: nobody else can be on them."""

    def own_segments(self) -> Path:
        """Where this engine's payloads lie; what engines before it left is removed.

        One that was stopped and wakes after its lease was taken may have the same folder open, and ends by
        clearing what it takes for its own.
        """
        if self.lease is None:
            return self.data.segments
        own = self.data.segments / f"epoch-{self.lease.epoch}"
        for left in self.data.segments.glob("epoch-*"):
            if left != own:
                shutil.rmtree(left, ignore_errors=True)
        return own

    @classmethod
    def of_processes(
        cls,
        definition: Definition,
        data: DataFolder,
        settings: ServerSettings,
        records: Records | None = None,
        lease: Lease | None = None,
    ) -> Parts:
        """A trainer and a sampling engine in processes of their own; the folder must exist.

        Args:
            definition: what is served.
            data: where checkpoints, logs and, if no records are given, the records are.
            settings: limits of the server.
            records: those to use, if a lease is held on them.
            lease: see `Parts.lease`.
        """
        return cls(
            definition=definition,
            data=data,
            launcher=ProcessLauncher(
                definition=definition,
                checkpoints_root=data.checkpoints,
                log_path=data.logs / "backend.log",
            ),
            sampler_launcher=ProcessSamplerLauncher(
                definition=definition, log_file=data.logs / "sampler.log"
            ),
            control=open_control(data, records=records),
            settings=settings,
            lease=lease,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontParts:
    """What a front without an engine is built from."""

    hello: Hello
    """What the engine said of itself."""
    line: Line
    """To the engine; watched by whoever opened it."""
    control: Control
    settings: ServerSettings = field(default_factory=ServerSettings)


def open_control(
    data: DataFolder, clock: Callable[[], float] = time.time, records: Records | None = None
) -> Control:
    """The control plane of a data folder, for the process of its engine: the index is made equal to the volume."""
    records = records or Records.at(data.root)
    return Control.of_engine(records, open_checkpoints(data.checkpoints), clock)
