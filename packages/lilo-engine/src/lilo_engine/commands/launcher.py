"""Launcher: how the engine gets a trainer, and hears that it is gone.

    Launcher.start(epoch) -> RunningBackend: .backend, wait_lost(), stop()

`ProcessLauncher` runs it as a child process behind the bridge; `MemoryLauncher` calls a factory in this process, for
tests and benchmarks. The engine's supervisor is the only caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
from lilo_definitions import Definition

from lilo_engine.commands.backend import Backend, BackendConfig, BackendFactory
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.commands.process import BackendProcess, start_process
from lilo_engine.commands.threads import in_thread
from lilo_engine.errors import BackendLost, LiloError

LOSS_NEWS_LIMIT_S = 1.0
"""A command that failed and the cause of its failure come within this of each other; see `process.py`."""


class RunningBackend(Protocol):
    """A trainer that was started and answers."""

    @property
    def backend(self) -> Backend:
        """It, for calls from threads."""
        ...

    async def wait_lost(self) -> str:
        """Return when it is of no use any more: the first cause, in words."""
        ...

    async def stop(self) -> None:
        """End it, gone or not; bounded, and never raises."""
        ...


class Launcher(Protocol):
    """Starts trainers, one at a time."""

    async def start(self, epoch: int) -> RunningBackend:
        """Start one and wait until it describes itself.

        Raises:
            LiloError: it did not come up; the message has the cause.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLauncher:
    """Runs a trainer as a child process."""

    definition: Definition
    checkpoints_root: Path
    log_path: Path
    """Standard output and error of every trainer, appended."""
    backend: str = "miles"
    """Name in the entry-point group `lilo.backends`."""

    async def start(self, epoch: int) -> RunningBackend:
        """Start a child; ends at once if the child does, quoting its last words."""
        start = partial(
            start_process,
            backend=self.backend,
            definition=self.definition,
            checkpoints_root=self.checkpoints_root,
            log_path=self.log_path,
            epoch=epoch,
        )
        try:
            child = await anyio.to_thread.run_sync(start)
        except OSError as error:
            raise BackendLost(f"the backend process could not be started: {error}") from error
        running = _RunningProcess(child)
        try:
            await in_thread(child.client.describe)
        except LiloError as error:
            cause = error.message
            if not child.client.was_told:
                with anyio.move_on_after(LOSS_NEWS_LIMIT_S):
                    cause = await running.wait_lost()
                cause = f"{cause}; {child.last_words()}"
            await running.stop()
            raise BackendLost(f"the trainer did not come up: {cause}") from error
        except BaseException:
            with anyio.CancelScope(shield=True):
                await running.stop()
            raise
        return running


class _RunningProcess:
    def __init__(self, child: BackendProcess) -> None:
        self._child = child

    @property
    def backend(self) -> Backend:
        return self._child.client

    async def wait_lost(self) -> str:
        return await in_thread(self._child.wait_lost)

    async def stop(self) -> None:
        await anyio.to_thread.run_sync(self._child.stop)


@dataclass(slots=True, kw_only=True)
class MemoryLauncher:
    """Builds a trainer in this process."""

    definition: Definition
    checkpoints_root: Path
    factory: BackendFactory = MemoryBackend
    started: list[RunningMemory] = field(default_factory=list["RunningMemory"])
    """Every trainer that was started, newest last."""

    async def start(self, epoch: int) -> RunningMemory:
        """Call the factory in a thread."""
        config = BackendConfig(
            definition=self.definition,
            checkpoints_root=str(self.checkpoints_root),
            epoch=epoch,
        )
        try:
            backend = await in_thread(self.factory, config)
        except Exception as error:
            raise BackendLost(
                f"the trainer did not come up: {type(error).__name__}: {error}"
            ) from error
        running = RunningMemory(backend)
        self.started.append(running)
        return running


class RunningMemory:
    """A trainer in this process; it is lost when `lose` says so."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lost = anyio.Event()
        self._cause = ""

    def lose(self, cause: str) -> None:
        """Make it lost, as a dead process would be."""
        self._cause = cause
        self._lost.set()

    async def wait_lost(self) -> str:
        """Return when it was lost: the cause."""
        await self._lost.wait()
        return self._cause

    async def stop(self) -> None:
        """Close it."""
        await anyio.to_thread.run_sync(self.backend.close)
