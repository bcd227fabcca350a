"""Bridge server: the trainer's side of the bridge. Runs in the backend process; `serve_backend.py` starts it.

The GPU channel is served by the thread that calls `serve` (the main thread: devices and compilers want one), every
other connection by a thread of its own, so that persisting and health go on beside a long pass.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from lilo_engine.commands.backend import Backend
from lilo_engine.commands.bridge import CHANNEL_OF, Channel, Command, Reply
from lilo_engine.commands.connection import Connection
from lilo_engine.commands.frames import FrameError
from lilo_engine.errors import BackendLost, LiloError

_log = logging.getLogger(__name__)


def serve(
    backend: Backend,
    streams: Mapping[Channel, Sequence[socket.socket]],
    *,
    epoch: int,
    on_lost: Callable[[str], None],
) -> None:
    """Answer commands until `close` was called, the trainer is lost, or the other side is gone.

    Args:
        backend: the trainer.
        streams: connected sockets, by channel.
        epoch: of this trainer; commands for another one are refused.
        on_lost: called from any thread with the cause when the trainer gave itself up, after the answer was sent.
    """
    for channel, members in streams.items():
        if channel == "gpu":
            continue
        for stream in members:
            threading.Thread(
                target=_serve_channel,
                args=(backend, Connection(stream), channel, epoch, on_lost),
                name=f"bridge-{channel}",
                daemon=True,
            ).start()
    (gpu,) = streams["gpu"]
    _serve_channel(backend, Connection(gpu), "gpu", epoch, on_lost)


def decline(streams: Mapping[Channel, Sequence[socket.socket]], cause: str) -> None:
    """Answer the first command of the GPU channel, which asks what there is, with why there is no trainer."""
    (gpu,) = streams["gpu"]
    connection = Connection(gpu)
    try:
        connection.receive(None)
        connection.send(BackendLost(cause), None)
    except (OSError, EOFError, FrameError) as error:
        _log.info("nobody hears why there is no trainer: %s", error)


def _serve_channel(
    backend: Backend,
    connection: Connection,
    channel: Channel,
    epoch: int,
    on_lost: Callable[[str], None],
) -> None:
    """Answer one connection; it is shut at the end, so that nobody waits for an answer that cannot come."""
    lost: BackendLost | None = None
    try:
        goes_on = True
        while goes_on:
            command = connection.receive(None)
            answer = _answer(backend, command, channel, epoch)
            try:
                connection.send(answer, None)
            except FrameError as error:
                answer = BackendLost(f"the answer to {command.method} cannot travel: {error}")
                connection.send(answer, None)
            if isinstance(answer, BackendLost):
                lost = answer
            goes_on = lost is None and command.method != "close"
    except (OSError, EOFError, FrameError) as error:
        _log.info("the %s connection ended: %s", channel, error)
    finally:
        connection.shutdown()
    if lost is not None:
        on_lost(lost.message)


def _answer(backend: Backend, command: object, channel: Channel, epoch: int) -> Reply | LiloError:
    """Run one command. A UserError and the like concern it alone; anything else means the trainer is lost."""
    if not isinstance(command, Command) or CHANNEL_OF.get(command.method) != channel:
        return BackendLost(f"{command!r:.200} is no command of the {channel} channel")
    if command.epoch != epoch:
        return BackendLost(f"{command.method} is for epoch {command.epoch}; this is epoch {epoch}")
    try:
        return Reply(value=getattr(backend, command.method)(*command.args, **command.kwargs))
    except LiloError as error:
        return error
    except Exception as error:
        _log.exception("%s failed; the trainer is given up", command.method)
        return BackendLost(
            f"{command.method} failed in the trainer: {type(error).__name__}: {error}"
        )
