"""Launchers: a running sampling engine for as long as a context lasts.

`ProcessSamplerLauncher` starts `host.py` as a child (`commands/child.py`) and talks to it over an inherited socket that
has no name. Its first answer says that its model is loaded, so readiness is an event, no port is open, and nothing of
it lies in a folder. `MemorySamplerLauncher` is for tests. `supervisor.py` launches again when an engine is lost.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import anyio
import anyio.abc
import anyio.to_thread
from lilo_definitions import Definition

from lilo_engine.commands.child import Child, start_child
from lilo_engine.commands.threads import in_thread
from lilo_engine.errors import LiloError, ServerError
from lilo_engine.sampling.engine import SamplerConfig, SamplingEngine
from lilo_engine.sampling.host import HostConfig
from lilo_engine.sampling.memory import MemorySamplingEngine
from lilo_engine.sampling.messages import MessageStream
from lilo_engine.sampling.remote import RemoteSamplingEngine

_EXIT_S = 10.0
"""For a child that was told to end: it finishes the step it is in. Then it is killed."""
_CAUSE_S = 2.0
"""For the exit status of a child whose connection has ended."""


class RunningSampler(Protocol):
    """An engine that takes calls."""

    engine: SamplingEngine

    async def wait_lost(self) -> str:
        """Return, with the cause in words, when the engine takes no more calls."""
        ...


class SamplerLauncher(Protocol):
    """How the manager gets an engine."""

    def launch(self) -> AbstractAsyncContextManager[RunningSampler]:
        """Start one; it is stopped when the context ends.

        Raises:
            ServerError: it did not start; the message says why and where its log is.
        """
        ...


class _Running:
    """What a launcher yields."""

    def __init__(self, engine: SamplingEngine) -> None:
        self.engine = engine
        self._lost = anyio.Event()
        self._cause = ""

    def lose(self, cause: str) -> None:
        self._cause = cause
        self._lost.set()

    async def wait_lost(self) -> str:
        await self._lost.wait()
        return self._cause


class MemorySamplerLauncher:
    """Engines in memory; `lose` ends the one that runs, as a crash would."""

    def __init__(self, definition: Definition) -> None:
        """Start nothing."""
        self.launches = 0
        self._definition = definition
        self._running: _Running | None = None

    @asynccontextmanager
    async def launch(self) -> AsyncGenerator[RunningSampler]:
        """See `SamplerLauncher`."""
        self.launches += 1
        engine = MemorySamplingEngine(SamplerConfig(definition=self._definition))
        self._running = _Running(engine)
        try:
            yield self._running
        finally:
            self._running = None
            await engine.close()

    def lose(self, cause: str) -> None:
        """Have the running engine's `wait_lost` return."""
        assert self._running is not None, "no engine is running"
        self._running.lose(cause)


class ProcessSamplerLauncher:
    """Engines in child processes."""

    def __init__(self, *, definition: Definition, log_file: Path) -> None:
        """Start nothing.

        Args:
            definition: names the engine and the model; its start-up limit is kept.
            log_file: the child's output is appended here; its folder must exist.
        """
        self._definition = definition
        self._log_file = log_file

    @asynccontextmanager
    async def launch(self) -> AsyncGenerator[RunningSampler]:
        """See `SamplerLauncher`."""
        ours, theirs = socket.socketpair()
        config = HostConfig(definition=self._definition, descriptor=theirs.fileno())
        try:
            child = await anyio.to_thread.run_sync(self._start, config)
        except OSError as error:
            ours.close()
            raise ServerError(
                f"the sampling process cannot be started, or its log {self._log_file} cannot be written: {error}"
            ) from error
        finally:
            theirs.close()
        try:
            stream = MessageStream(await anyio.abc.UNIXSocketStream.from_socket(ours))
            async with self._connected(stream, child) as running:
                refusal = await self._not_ready(running.engine, child)
                if refusal is None:
                    yield running
            if refusal is not None:
                raise refusal
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(child.stop)

    def _start(self, config: HostConfig) -> Child:
        return start_child(
            "lilo_engine.sampling.host",
            config.model_dump_json(),
            [config.descriptor],
            self._log_file,
        )

    async def _not_ready(self, engine: SamplingEngine, child: Child) -> ServerError | None:
        """Wait until the engine answers, as it does when its model is loaded; why it never will, if so."""
        limit_s = self._definition.limits.startup_timeout_s
        try:
            with anyio.fail_after(limit_s):
                await engine.info()
        except TimeoutError:
            how = f"was not ready within startup_timeout_s = {limit_s:g} s"
        except LiloError as error:
            how = f"(pid {child.pid}) {child.exit or error.message} before it was ready"
        else:
            return None
        return ServerError(f"the sampling process {how}; {child.last_words()}")

    @asynccontextmanager
    async def _connected(self, stream: MessageStream, child: Child) -> AsyncGenerator[_Running]:
        """The client with its reader; a lost connection fails the running calls at once."""
        engine = RemoteSamplingEngine(stream)
        running = _Running(engine)

        async def read() -> None:
            await engine.run()
            await in_thread(child.wait, _CAUSE_S)
            cause = f"the sampling process {_end_of(child)}"
            engine.fail(ServerError(f"{cause}; send the request again"))
            running.lose(cause)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            try:
                yield running
            finally:
                await _close(engine, child)
                tasks.cancel_scope.cancel()


def _end_of(child: Child) -> str:
    how = child.exit or "closed its connection"
    return f"(pid {child.pid}) {how}{child.complaint()}"


async def _close(engine: RemoteSamplingEngine, child: Child) -> None:
    """Close the connection, upon which the child ends by itself."""
    with anyio.CancelScope(shield=True):
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await engine.close()
        await in_thread(child.wait, _EXIT_S)
