"""RemoteSamplingEngine: a sampling engine in another process, over a message stream.

Calls are multiplexed; one task (`run`) reads all replies. When the connection is lost every running call fails at
once with the cause, and so does every later one: nothing is sent twice and nothing waits for an answer that cannot
come. The process itself is `launcher.py`'s business.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any, cast

import anyio

from lilo_engine.errors import LiloError, ServerError
from lilo_engine.sampling.engine import SampleRequest, SampleResult, SamplerHealth, SamplerInfo
from lilo_engine.sampling.messages import (
    LOST,
    MessageStream,
    Method,
    SamplerCall,
    SamplerCancel,
    SamplerReply,
)

_log = logging.getLogger(__name__)


class _Waiting:
    """One call without an answer yet."""

    __slots__ = ("answered", "reply")

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.reply: SamplerReply | None = None


class RemoteSamplingEngine:
    """Implements `SamplingEngine` for the side that has no torch."""

    def __init__(self, stream: MessageStream) -> None:
        """Nothing is received until `run` is running."""
        self._stream = stream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._lost: LiloError | None = None

    async def run(self) -> None:
        """Receive replies until the connection is lost; returns then. Running calls wait for `fail`."""
        try:
            while True:
                message = await self._stream.receive()
                if isinstance(message, SamplerReply):
                    self._settle(message)
                else:
                    _log.error("a message of type %s is not for a client", type(message).__name__)
        except LOST:
            return

    def fail(self, error: LiloError) -> None:
        """Fail every running and every later call."""
        self._lost = error
        for number in list(self._waiting):
            self._settle(SamplerReply(number=number, error=error))

    async def load(self, name: str, folder: str) -> None:
        """See `SamplingEngine`."""
        await self._call("load", name, folder)

    async def unload(self, name: str) -> None:
        """See `SamplingEngine`."""
        await self._call("unload", name)

    async def sample(self, request: SampleRequest) -> SampleResult:
        """See `SamplingEngine`; cancelling the call cancels it on the other side."""
        return cast("SampleResult", await self._call("sample", request))

    async def abort(self, request_id: str) -> None:
        """See `SamplingEngine`."""
        await self._call("abort", request_id)

    async def health(self) -> SamplerHealth:
        """See `SamplingEngine`."""
        return cast("SamplerHealth", await self._call("health"))

    async def info(self) -> SamplerInfo:
        """See `SamplingEngine`."""
        return cast("SamplerInfo", await self._call("info"))

    async def close(self) -> None:
        """Close the connection; the other process closes its engine and ends."""
        self.fail(ServerError("the sampling engine was closed"))
        await self._stream.aclose()

    async def _call(self, method: Method, *arguments: object) -> Any:  # noqa: ANN401 - the methods above know the type
        number = next(self._numbers)
        waiting = _Waiting()
        self._waiting[number] = waiting
        try:
            if self._lost is not None:
                raise self._lost
            try:
                await self._stream.send(
                    SamplerCall(number=number, method=method, arguments=arguments)
                )
            except LOST as error:
                # `fail` follows with the cause as soon as the reader has seen it; this call has its own words.
                raise ServerError(
                    f"the sampling process cannot be reached: {type(error).__name__}"
                ) from error
            await waiting.answered.wait()
        except anyio.get_cancelled_exc_class():
            await self._cancel(number)
            raise
        finally:
            self._waiting.pop(number, None)
        assert waiting.reply is not None
        if waiting.reply.error is not None:
            raise waiting.reply.error
        return waiting.reply.value

    async def _cancel(self, number: int) -> None:
        if self._lost is not None:
            return
        with anyio.CancelScope(shield=True):
            try:
                await self._stream.send(SamplerCancel(number=number))
            except LOST:
                _log.info("call %d ended with its connection", number)

    def _settle(self, reply: SamplerReply) -> None:
        waiting = self._waiting.get(reply.number)
        if waiting is not None and waiting.reply is None:
            waiting.reply = reply
            waiting.answered.set()
