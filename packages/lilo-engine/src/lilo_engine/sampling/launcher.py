"""Launchers: a running sampling engine for as long as a context lasts.

`ProcessSamplerLauncher` starts `host.py` as a child in a session of its own and listens for it on a Unix socket
(mode 0600, in a private folder). The child connects when its model is loaded, so readiness is an event and no port is
open. `MemorySamplerLauncher` is for tests. `supervisor.py` launches again when an engine is lost.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

import anyio
import anyio.abc
from lilo_definitions import Definition

from lilo_engine.commands.child import describe_exit
from lilo_engine.errors import ServerError
from lilo_engine.log_tail import last_words
from lilo_engine.sampling.engine import SamplerConfig, SamplingEngine
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
        folder = Path(tempfile.mkdtemp(prefix="lilo-"))
        log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
        try:
            async with (
                await anyio.create_unix_listener(folder / "s", mode=0o600) as listener,
                self._child(folder) as child,
            ):
                stream = await self._accept(listener, child, log_start)
                # Nothing needs the names any more, and a server that is killed cannot clean up later.
                shutil.rmtree(folder, ignore_errors=True)
                async with self._connected(stream, child) as running:
                    yield running
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @asynccontextmanager
    async def _child(self, folder: Path) -> AsyncGenerator[anyio.abc.Process]:
        """The process, from its start until it has ended."""
        definition = folder / "definition.json"
        definition.write_text(self._definition.model_dump_json())
        # -P: a file in the working directory must not stand in for a module.
        command = [sys.executable, "-P", "-m", "lilo_engine.sampling.host"]
        command += ["--socket", str(folder / "s"), "--definition", str(definition)]
        with self._open_log() as log:
            # A session of its own: Ctrl-C in a terminal reaches the server, which then ends its children in order.
            child = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield child
        finally:
            with anyio.CancelScope(shield=True):
                await _end(child)

    def _open_log(self) -> IO[bytes]:
        try:
            return self._log_file.open("ab")
        except OSError as error:
            raise ServerError(
                f"the log {self._log_file} of the sampling process cannot be written: {error}"
            ) from error

    async def _accept(
        self, listener: anyio.abc.SocketListener, child: anyio.abc.Process, log_start: int
    ) -> MessageStream:
        """Wait until the child connects, ends, or runs out of time."""
        limit_s = self._definition.limits.startup_timeout_s
        accepted: list[anyio.abc.SocketStream] = []

        async def watch(scope: anyio.CancelScope) -> None:
            await child.wait()
            scope.cancel()

        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch, tasks.cancel_scope)
                accepted.append(await listener.accept())
                tasks.cancel_scope.cancel()
        if accepted:
            return MessageStream(accepted[0])
        if child.returncode is not None:
            how = f"(pid {child.pid}) {describe_exit(child.returncode)} before it was ready"
        else:
            how = f"was not ready within startup_timeout_s = {limit_s:g} s"
        words = last_words(self._log_file, log_start)
        raise ServerError(f"the sampling process {how}; {words}")

    @asynccontextmanager
    async def _connected(
        self, stream: MessageStream, child: anyio.abc.Process
    ) -> AsyncGenerator[_Running]:
        """The client with its reader; a lost connection fails the running calls at once."""
        engine = RemoteSamplingEngine(stream)
        running = _Running(engine)

        async def read() -> None:
            await engine.run()
            with anyio.move_on_after(_CAUSE_S):
                await child.wait()
            cause = f"the sampling process {self._ended(child)}"
            engine.fail(ServerError(f"{cause}; send the request again"))
            running.lose(cause)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            try:
                yield running
            finally:
                await _close(engine, child)
                tasks.cancel_scope.cancel()

    def _ended(self, child: anyio.abc.Process) -> str:
        code = child.returncode
        how = "closed its connection" if code is None else describe_exit(code)
        return f"(pid {child.pid}) {how}; its log is {self._log_file}"


async def _close(engine: RemoteSamplingEngine, child: anyio.abc.Process) -> None:
    """Close the connection, upon which the child ends by itself."""
    with anyio.CancelScope(shield=True):
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await engine.close()
        with anyio.move_on_after(_EXIT_S):
            await child.wait()


async def _end(child: anyio.abc.Process) -> None:
    """Kill a child that has not ended by now: one that never connected, or that takes too long."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            child.kill()
    await child.wait()
    await child.aclose()
