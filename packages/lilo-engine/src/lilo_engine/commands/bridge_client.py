"""Bridge client: a Backend whose work is done in another process. Blocking; `dispatch.py` calls it from threads.

Nothing is ever sent twice. A lost reply, a limit that ran out without progress (`strikes.py`) or any transport error
fences the client once and for all: nobody can know whether the command was carried out, so nothing more is sent, and
every waiting or later call raises BackendLost with the first cause.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lilo_definitions import Limits

from lilo_engine.commands.backend import CaptureKind
from lilo_engine.commands.bridge import (
    CHANNEL_OF,
    CHANNELS,
    HEALTH_LIMIT_S,
    Channel,
    Command,
    Reply,
    command_limit,
)
from lilo_engine.commands.command import (
    BackendInfo,
    Batch,
    CaptureId,
    Destination,
    Health,
    Output,
    Published,
)
from lilo_engine.commands.connection import Connection
from lilo_engine.commands.frames import FrameError
from lilo_engine.commands.strikes import Strikes
from lilo_engine.errors import BackendLost, LiloError, Unavailable
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.reference import CheckpointRef

RELEASE_LIMIT_S = 1.0
"""A waiting thread was woken by the fence and gives its connection back at once."""
CLOSE_LIMIT_S = 2.0
"""A trainer that cannot close by then is ended by signals."""


class BridgeClient:
    """Implements `Backend`."""

    def __init__(
        self, streams: Mapping[Channel, Sequence[socket.socket]], *, epoch: int, limits: Limits
    ) -> None:
        """Take over connected streams, by channel."""
        self._epoch = epoch
        self._limits = limits
        self._all = [Connection(stream) for channel in CHANNELS for stream in streams[channel]]
        self._free: dict[Channel, queue.Queue[Connection]] = {}
        connections = iter(self._all)
        for channel in CHANNELS:
            self._free[channel] = queue.Queue()
            for _ in streams[channel]:
                self._free[channel].put(next(connections))
        self._counts = {channel: len(streams[channel]) for channel in CHANNELS}
        self._fence = threading.Lock()
        self._fenced = threading.Event()
        self._cause: str | None = None
        self.was_told = False
        """Whether the cause is what the trainer said of itself."""
        self._health_owed = False
        """Whether an answer is still to come on the health connection."""

    @property
    def cause(self) -> str | None:
        """Why it is fenced, or None."""
        return self._cause

    def wait_lost(self) -> str:
        """Block until it is fenced: the cause."""
        self._fenced.wait()
        assert self._cause is not None
        return self._cause

    def describe(self) -> BackendInfo:
        """What it can do; waits for the start-up to end."""
        return cast("BackendInfo", self._call("describe"))

    def create_adapter(self, model_id: ModelId, spec: LoraSpec) -> None:
        """Make a fresh adapter."""
        self._call("create_adapter", model_id, spec)

    def forward_backward(self, batch: Batch) -> list[Output]:
        """Run the items."""
        return cast("list[Output]", self._call("forward_backward", batch))

    def optim_step(self, model_id: ModelId, params: AdamParams) -> Mapping[str, float]:
        """One AdamW step."""
        return cast("Mapping[str, float]", self._call("optim_step", model_id, params))

    def capture(self, model_id: ModelId, kind: CaptureKind) -> CaptureId:
        """Freeze the model's state."""
        return CaptureId(cast("str", self._call("capture", model_id, kind)))

    def persist(self, capture_id: CaptureId, destination: Destination) -> Published:
        """Publish a capture."""
        return cast("Published", self._call("persist", capture_id, destination))

    def prepare_load(self, source: CheckpointRef, *, with_optimizer: bool) -> None:
        """Read and check a checkpoint that will be loaded."""
        self._call("prepare_load", source, with_optimizer=with_optimizer)

    def load(self, model_id: ModelId, source: CheckpointRef, *, with_optimizer: bool) -> None:
        """Replace the adapter by a published one."""
        self._call("load", model_id, source, with_optimizer=with_optimizer)

    def drop_gradients(self, model_id: ModelId) -> None:
        """Forget the gradients of this window."""
        self._call("drop_gradients", model_id)

    def unload(self, model_id: ModelId) -> None:
        """Free the slot."""
        self._call("unload", model_id)

    def health(self) -> Health:
        """Progress.

        A late answer does not fence: asking changes nothing, and the answer is read when health is asked again.

        Raises:
            Unavailable: it did not answer within `HEALTH_LIMIT_S`.
        """
        if self._cause is not None:
            raise BackendLost(self._cause)
        try:
            connection = self._free["health"].get(timeout=HEALTH_LIMIT_S)
        except queue.Empty:
            raise self._no_health() from None
        try:
            if self._health_owed:
                self._receive_health(connection)
            self._health_owed = True
            connection.send(self._command("health"), HEALTH_LIMIT_S)
            return self._receive_health(connection)
        except (OSError, EOFError, FrameError) as error:
            raise self._lost(f"the connection broke during health: {error}") from error
        finally:
            self._free["health"].put(connection)

    def close(self) -> None:
        """Ask the trainer to end, for at most `CLOSE_LIMIT_S`, then fence; one in mid-command is not asked."""
        if self._cause is None and not self._free["gpu"].empty():
            with contextlib.suppress(LiloError):
                self._exchange(
                    "gpu", self._command("close"), CLOSE_LIMIT_S, "the limit for closing"
                )
        self.fence("it was closed")

    def fence(self, cause: str, *, told: bool = False) -> None:
        """Send nothing any more and wake everybody who waits; the first cause is kept.

        Args:
            cause: in words.
            told: the trainer said it of itself.
        """
        with self._fence:
            if self._cause is not None:
                return
            self._cause = cause
            self.was_told = told
        self._fenced.set()
        for connection in self._all:
            connection.shutdown()

    def release(self) -> None:
        """Close the descriptors, once nobody waits on them any more; it is fenced before."""
        assert self._cause is not None, "release comes after fence"
        for channel, free in self._free.items():
            taken: list[Connection] = []
            for _ in range(self._counts[channel]):
                with contextlib.suppress(queue.Empty):
                    taken.append(free.get(timeout=RELEASE_LIMIT_S))
            for connection in taken:
                connection.close()
                free.put(connection)

    def _receive_health(self, connection: Connection) -> Health:
        if not connection.wait_readable(HEALTH_LIMIT_S):
            raise self._no_health()
        answer = connection.receive(HEALTH_LIMIT_S)
        self._health_owed = False
        if isinstance(answer, Reply) and isinstance(answer.value, Health):
            return answer.value
        if isinstance(answer, BackendLost):
            raise self._lost(answer.message, told=True)
        raise self._lost(f"it answered health with {answer!r:.200}")

    @staticmethod
    def _no_health() -> Unavailable:
        return Unavailable(f"the trainer did not tell its progress within {HEALTH_LIMIT_S:g} s")

    def _call(self, method: str, *args: object, **kwargs: object) -> object:
        limit_s, words = command_limit(method, args, self._limits)
        command = self._command(method, *args, **kwargs)
        return self._exchange(CHANNEL_OF[method], command, limit_s, words)

    def _command(self, method: str, *args: object, **kwargs: object) -> Command:
        return Command(method=method, epoch=self._epoch, args=args, kwargs=kwargs)

    def _exchange(self, channel: Channel, command: Command, limit_s: float, words: str) -> object:
        if self._cause is not None:
            raise BackendLost(self._cause)
        try:
            connection = self._free[channel].get(timeout=limit_s)
        except queue.Empty:
            raise self._lost(
                f"no connection for {command.method} came free within {words}"
            ) from None
        try:
            answer = self._round_trip(connection, command, limit_s, words)
        finally:
            self._free[channel].put(connection)
        if isinstance(answer, BackendLost):
            raise self._lost(answer.message, told=True)
        if isinstance(answer, LiloError):
            raise answer
        if not isinstance(answer, Reply):
            raise self._lost(f"it answered {command.method} with a {type(answer).__name__}")
        return answer.value

    def _round_trip(
        self, connection: Connection, command: Command, limit_s: float, words: str
    ) -> Any:  # noqa: ANN401 - checked by the caller
        if self._cause is not None:
            raise BackendLost(self._cause)
        try:
            connection.send(command, limit_s)
            self._await_answer(connection, limit_s)
            # It has begun to come, and the rest of it follows as fast as it can be read.
            return connection.receive(limit_s)
        except TimeoutError:
            raise self._lost(
                f"it did not answer {command.method} and made no progress within {words}"
            ) from None
        except (OSError, EOFError, FrameError) as error:
            text = str(error) or type(error).__name__
            raise self._lost(f"the connection broke during {command.method}: {text}") from error

    def _await_answer(self, connection: Connection, limit_s: float) -> None:
        """Block until an answer begins to come, for as long as the trainer gets on.

        Raises:
            TimeoutError: it has not got on for the limit.
        """
        strikes = Strikes(limit_s=limit_s, since_s=time.monotonic())
        while not connection.wait_readable(strikes.until_look_s(time.monotonic())):
            if strikes.look(time.monotonic(), self._still_s()):
                raise TimeoutError

    def _still_s(self) -> float | None:
        """How long ago the trainer, or any rank of it, last got on; None when it does not say."""
        try:
            health = self.health()
        except Unavailable:
            return None
        return min((rank.age_s for rank in health.ranks), default=health.age_s)

    def _lost(self, cause: str, *, told: bool = False) -> BackendLost:
        """Fence, and give the error with the first cause there was."""
        self.fence(cause, told=told)
        return BackendLost(self._cause or cause)
