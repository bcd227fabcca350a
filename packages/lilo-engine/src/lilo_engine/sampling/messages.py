"""Messages between the process that manages sampling and the one that samples, and the stream that carries them.

Every call has a number; replies come in any order. Frames (`commands/frames.py`) follow each other, each after its
length as a little-endian u64. What is ready at once is written at once: a write wakes the other process up, which costs
both more than a message does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import anyio
import anyio.abc
import anyio.lowlevel
from anyio.streams.buffered import BufferedByteReceiveStream

from lilo_engine.commands import frames
from lilo_engine.errors import LiloError
from lilo_engine.sampling.engine import (
    AltTokens,
    CellLayout,
    PromptTargets,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplerHealth,
    SamplerInfo,
    SamplingParams,
    TargetScores,
    TopK,
)

_LENGTH = struct.Struct("<Q")

Method: TypeAlias = Literal["load", "unload", "sample", "abort", "health", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCall:
    """Call a method of the engine."""

    number: int
    method: Method
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCancel:
    """The caller of `number` does not wait any more."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerReply:
    """The answer to a call: a value or an error."""

    number: int
    value: Any = None
    error: LiloError | None = None


frames.register(
    AltTokens,
    CellLayout,
    PromptTargets,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplerCall,
    SamplerCancel,
    SamplerHealth,
    SamplerInfo,
    SamplerReply,
    SamplingParams,
    TargetScores,
    TopK,
)


class MessageStream:
    """Whole messages over a byte stream; several tasks may send, one receives."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        """Take the stream over."""
        self._stream = stream
        self._received = BufferedByteReceiveStream(stream)
        self._outgoing: list[bytes] = []
        """Frames with their lengths that no write has taken yet."""
        self._writing = False

    async def send(self, message: object) -> None:
        """Send one message; one that was begun is finished even if the caller is cancelled.

        Returns when it is written, or when a write that others wait for will take it along. If that one fails, it is
        `receive` that tells.

        Raises:
            anyio.BrokenResourceError, anyio.ClosedResourceError: the other side is gone.
            FrameError: it cannot travel; nothing was sent.
        """
        frame = frames.encode(message)
        self._outgoing += (_LENGTH.pack(len(frame)), frame)
        if self._writing:
            return
        self._writing = True
        try:
            # Half a frame would put the stream out of step for everybody, so a cancellation waits for the end of it.
            with anyio.CancelScope(shield=True):
                while self._outgoing:
                    await anyio.lowlevel.checkpoint()  # what is as ready as this goes with it
                    ready, self._outgoing = self._outgoing, []
                    await self._stream.send(b"".join(ready))
        finally:
            self._writing = False

    async def receive(self) -> object:
        """The next message.

        Raises:
            anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError: the other side is gone.
            FrameError: the stream is out of step.
        """
        (length,) = _LENGTH.unpack(await self._received.receive_exactly(_LENGTH.size))
        if length > frames.MAX_FRAME_BYTES:
            raise frames.FrameError(
                f"a message of {length} bytes is over the limit of {frames.MAX_FRAME_BYTES}"
            )
        return frames.decode(await self._received.receive_exactly(length))

    async def aclose(self) -> None:
        """Close both directions."""
        await self._stream.aclose()


LOST: tuple[type[Exception], ...] = (
    anyio.EndOfStream,
    anyio.IncompleteRead,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    frames.FrameError,
    OSError,
)
"""What a `MessageStream` raises when the connection cannot be used any more."""
