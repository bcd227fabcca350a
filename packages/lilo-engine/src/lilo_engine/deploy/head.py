"""Head: the server inside a trainer container: one life of a run, between taking up its state and leaving it.

It has three parts, and while it serves three tasks beside the server:

take up   records from their newest whole snapshot; for each model the newest whole training state is named
serve     front, engine, trainer, sampler; a snapshot of the records every `snapshot_s`
leave     at the deadline, or when told to: finish what is being published, snapshot the records

snapshots   waits for: its interval       unblocked by: the clock
leaving     waits for: deadline or stop    unblocked by: the clock, the caller's event
opening     waits for: trainer and sampler   unblocked by: them, the limit of a start
"""

from __future__ import annotations

import logging
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.to_thread
from lilo_definitions import Definition
from lilo_volume import VolumeError

from lilo_engine.app import build_app
from lilo_engine.config import DataFolder, api_key_from_environment, records_url
from lilo_engine.control.records import Records
from lilo_engine.deploy.resume import Resume, find_resumes
from lilo_engine.deploy.snapshots import FILE, Snapshots
from lilo_engine.deploy.surroundings import Surroundings
from lilo_engine.errors import ServerError
from lilo_engine.parts import Parts, ServerSettings
from lilo_engine.requests.front import Front
from lilo_engine.requests.web_server import WebServer
from lilo_engine.storage import open_folder

_log = logging.getLogger(__name__)

SAMPLER_START_S = 600.0
"""What the sampler may take beyond the trainer: it reads the same weights after it."""
PartsOf = Callable[[Definition, DataFolder], Parts]
"""Builds the parts of a server; tests give those that stay in memory."""


def of_processes(definition: Definition, data: DataFolder) -> Parts:
    """A trainer and a sampler in processes of their own, as `lilo serve` starts them."""
    return Parts.of_processes(definition, data, ServerSettings())


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a life does what, in seconds."""

    life_s: float
    """From the start until it leaves by itself; below the container's own limit, which would end it mid-write."""
    snapshot_s: float = 60.0
    """Between snapshots of the records: what a lost container can lose of its history, never of its checkpoints."""
    ready_look_s: float = 0.05
    """Between looks for readiness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One container's part of a run."""

    run: str
    surroundings: Surroundings
    timing: Timing
    announce: Callable[[str, tuple[Resume, ...]], None]
    """Called once, when clients can come: the local URL, and what their models go on from."""
    parts_of: PartsOf = of_processes
    host: str = "0.0.0.0"
    port: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    """Set from another thread: leave now."""

    @property
    def start_limit_s(self) -> float:
        """For trainer and sampler to come up, with one try more: an idle container costs as much as a busy one."""
        return 2 * self.surroundings.definition.limits.startup_timeout_s + SAMPLER_START_S

    def live(self) -> tuple[Resume, ...]:
        """Serve until the deadline, or until told to stop.

        Returns what the models of this run were told to go on from.

        Raises:
            ServerError: no API key is given, or the trainer never came up; the cause in words.
            VolumeError: the volume cannot be read at the start.
        """
        data = DataFolder(
            root=self.surroundings.data_dir / self.run,
            checkpoints_at=self.surroundings.checkpoint_root,
        )
        data.create()
        snapshots = self._snapshots()
        if records_url() is None:
            snapshots.restore(data.root / FILE)
        resumes = self._resumes(data)
        parts = self.parts_of(self.surroundings.definition, data)
        self._admit(parts)
        try:
            options = {"use_uvloop": True}
            anyio.run(self._serve, parts, snapshots, resumes, backend_options=options)
        finally:
            self._snapshot(snapshots, data)
        return resumes

    def _snapshots(self) -> Snapshots:
        root = self.surroundings.records_root
        return Snapshots(
            volume=open_folder(self.surroundings.checkpoint_volume, root), run=self.run
        )

    def _resumes(self, data: DataFolder) -> tuple[Resume, ...]:
        records = Records.at(data.root)
        try:
            volume = open_folder(self.surroundings.checkpoint_volume, data.checkpoints)
            return find_resumes(volume, records)
        finally:
            records.close()

    def _admit(self, parts: Parts) -> None:
        key = api_key_from_environment()
        if key is not None:
            parts.control.keys.create(f"run {self.run}", time.time(), key=key)
        elif not parts.control.keys.any():
            secrets = ", ".join(self.surroundings.definition.deployment.secrets) or "none is named"
            raise ServerError(
                f"no API key: put LILO_API_KEY=tml-... into a secret that deployment.secrets names ({secrets})"
            )

    async def _serve(self, parts: Parts, snapshots: Snapshots, resumes: tuple[Resume, ...]) -> None:
        listener = socket.create_server((self.host, self.port), backlog=2048)
        app = build_app(parts)
        front: Front = app.state.front
        server = WebServer(app, front.polls)
        await server.run(
            listener,
            partial(self._leave, server),
            partial(self._open, front, server, listener, resumes),
            partial(self._keep_snapshots, snapshots, parts.data),
        )

    async def _leave(self, server: WebServer) -> None:
        """End the server at the deadline or when told to."""
        with anyio.move_on_after(self.timing.life_s):
            await anyio.to_thread.run_sync(
                self.stop.wait, self.timing.life_s, abandon_on_cancel=True
            )
        server.stop()

    async def _open(
        self,
        front: Front,
        server: WebServer,
        listener: socket.socket,
        resumes: tuple[Resume, ...],
    ) -> None:
        """Announce once that clients can come, or end a server that never will be ready."""
        limit_s = self.start_limit_s
        end = anyio.current_time() + limit_s
        while True:
            readiness, state = await front.readiness(), await front.engine.state()
            if server.started and readiness.ready:
                break
            late = anyio.current_time() > end
            if late or state.phase == "stopped":
                late_words = f"not ready within {limit_s:g} s: {readiness.words}"
                cause = late_words if late else state.last_failure or "it stopped"
                server.fail(f"{front.definition.name} could not be started: {cause}")
                return
            await anyio.sleep(self.timing.ready_look_s)
        port = listener.getsockname()[1]
        await anyio.to_thread.run_sync(self.announce, f"http://127.0.0.1:{port}", resumes)

    async def _keep_snapshots(self, snapshots: Snapshots, data: DataFolder) -> None:
        while True:
            await anyio.sleep(self.timing.snapshot_s)
            await anyio.to_thread.run_sync(self._snapshot, snapshots, data)

    def _snapshot(self, snapshots: Snapshots, data: DataFolder) -> None:
        if records_url() is not None:
            return  # They are on a database server, which outlives this container.
        try:
            snapshots.take(data.root / FILE)
        except (VolumeError, sqlite3.Error, OSError):
            # The one before stays the newest, and the next one tries again: no reason to end a training run.
            _log.exception("the records of run %s were not snapshotted", self.run)
