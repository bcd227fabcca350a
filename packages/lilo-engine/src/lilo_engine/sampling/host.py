"""The sampling process: `python -m lilo_engine.sampling.host`. Started by `launcher.py`, never by a person.

It builds the engine that the definition names (entry-point group `lilo.samplers`), then serves calls side by side over
the socket that it inherited, until the parent closes its end. `commands/child.py` sees to it that it never outlives its
parent.
"""

from __future__ import annotations

import logging
import socket
from importlib.metadata import entry_points

import anyio
import anyio.abc
from lilo_definitions import Definition
from pydantic import BaseModel, ConfigDict

from lilo_engine.commands.child import begin_child
from lilo_engine.errors import LiloError, ServerError
from lilo_engine.sampling.engine import SamplerConfig, SamplerFactory, SamplingEngine
from lilo_engine.sampling.messages import (
    LOST,
    MessageStream,
    SamplerCall,
    SamplerCancel,
    SamplerReply,
)

GROUP = "lilo.samplers"
_METHODS = frozenset({"load", "unload", "sample", "abort", "health", "info"})

_log = logging.getLogger(__name__)


def find_factory(name: str) -> SamplerFactory:
    """The sampling engine that is installed under `name`.

    Raises:
        ServerError: there is none; the message names those there are.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        there = ", ".join(sorted(found)) or "none"
        raise ServerError(
            f"no sampling engine {name!r} is installed (there are: {there}); "
            "'embedded' comes with lilo-miles-backend"
        )
    factory: SamplerFactory = found[name].load()
    return factory


class HostConfig(BaseModel):
    """What the parent tells its child."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    definition: Definition
    descriptor: int
    """The inherited stream socket."""


class Host:
    """Serves one connection with one engine."""

    def __init__(self, engine: SamplingEngine, stream: MessageStream) -> None:
        """Nothing is served yet."""
        self._engine = engine
        self._stream = stream
        self._running: dict[int, anyio.CancelScope] = {}

    async def serve(self) -> None:
        """Answer calls until the other side is gone; then cancel what runs."""
        async with anyio.create_task_group() as tasks:
            try:
                while True:
                    self._take(await self._stream.receive(), tasks)
            except LOST as error:
                _log.info("the connection ended: %s", type(error).__name__)
            tasks.cancel_scope.cancel()

    def _take(self, message: object, tasks: anyio.abc.TaskGroup) -> None:
        if isinstance(message, SamplerCall):
            scope = anyio.CancelScope()
            self._running[message.number] = scope
            tasks.start_soon(self._answer, message, scope)
        elif isinstance(message, SamplerCancel):
            scope = self._running.get(message.number)
            if scope is not None:
                scope.cancel()
        else:
            _log.error("a message of type %s is not for a host", type(message).__name__)

    async def _answer(self, call: SamplerCall, scope: anyio.CancelScope) -> None:
        """Run one call; whatever goes wrong in it is its own answer."""
        try:
            with scope:
                reply = await self._reply(call)
                await self._stream.send(reply)
        except LOST:
            _log.info("the answer to call %d has nobody to go to", call.number)
        finally:
            del self._running[call.number]

    async def _reply(self, call: SamplerCall) -> SamplerReply:
        try:
            if call.method not in _METHODS:
                raise ServerError(f"a sampling engine has no method {call.method!r}")
            value = await getattr(self._engine, call.method)(*call.arguments)
            return SamplerReply(number=call.number, value=value)
        except LiloError as error:
            return SamplerReply(number=call.number, error=error)
        except Exception as error:  # one call must not end the process
            _log.exception("%s failed", call.method)
            words = f"the sampling engine failed in {call.method}: {type(error).__name__}: {error}"
            return SamplerReply(number=call.number, error=ServerError(words))


async def run(config: HostConfig) -> None:
    """Build the engine, serve, close."""
    definition = config.definition
    engine = find_factory(definition.sampler.engine)(SamplerConfig(definition=definition))
    try:
        parent = socket.socket(fileno=config.descriptor)
        parent.set_inheritable(False)
        stream = MessageStream(await anyio.abc.UNIXSocketStream.from_socket(parent))
        try:
            await Host(engine, stream).serve()
        finally:
            await stream.aclose()
    finally:
        await engine.close()


def main() -> None:
    """Learn from the parent what to serve, and serve it."""
    config = HostConfig.model_validate_json(begin_child())
    anyio.run(run, config, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
