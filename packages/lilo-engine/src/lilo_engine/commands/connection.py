"""Connection: values over a stream socket, one frame after another, every wait bounded. Blocking; no threads.

    u64 length | frame

Both ends of the bridge use it. Whatever goes wrong on it is an `OSError` (`TimeoutError` for a limit that ran out)
or a `FrameError`; after either, the stream is out of step and must be closed.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

from lilo_engine.commands import frames

_LENGTH = struct.Struct("<Q")
_SMALL_BYTES = 65536
"""Up to here prefix and frame go out in one call; beyond, the copy would cost more than a call."""


class Connection:
    """One stream; one request or reply at a time in each direction."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def send(self, value: object, limit_s: float | None) -> None:
        """Send one value.

        Raises:
            OSError: the other side is gone, or `limit_s` ran out.
            FrameError: the value cannot travel; nothing was sent.
        """
        self.send_frame(frames.encode(value), limit_s)

    def send_frame(self, frame: bytes, limit_s: float | None) -> None:
        """Send a frame that was encoded before, as one that goes to several streams is.

        Raises:
            OSError: the other side is gone, or `limit_s` ran out.
        """
        self._stream.settimeout(limit_s)
        if len(frame) <= _SMALL_BYTES:
            self._stream.sendall(_LENGTH.pack(len(frame)) + frame)
        else:
            self._stream.sendall(_LENGTH.pack(len(frame)))
            self._stream.sendall(frame)

    def receive(self, limit_s: float | None) -> Any:  # noqa: ANN401 - the caller knows the protocol
        """Receive one value.

        Raises:
            EOFError: the other side closed between two frames.
            OSError: it is gone, or `limit_s` ran out.
            FrameError: what came is no frame.
        """
        return frames.decode(self.receive_frame(limit_s))

    def receive_frame(self, limit_s: float | None) -> bytearray:
        """Receive one frame without decoding it.

        Raises:
            EOFError: the other side closed between two frames.
            OSError: it is gone, or `limit_s` ran out.
            FrameError: its length is over what frames may have.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > frames.MAX_FRAME_BYTES:
            raise frames.FrameError(f"a frame of {length} bytes is over {frames.MAX_FRAME_BYTES}")
        return self._read(length, deadline)

    def wait_readable(self, limit_s: float) -> bool:
        """Whether something has come within `limit_s`; nothing of it is read."""
        poller = select.poll()
        poller.register(self._stream, select.POLLIN)
        return bool(poller.poll(limit_s * 1000))

    def shutdown(self) -> None:
        """Wake whoever waits on it; they get an error. May be called from any thread, more than once."""
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Free the descriptor; only when nobody waits on it."""
        self._stream.close()

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            if deadline is not None:
                self._stream.settimeout(max(deadline - time.monotonic(), 1e-3))
            else:
                self._stream.settimeout(None)
            got = self._stream.recv_into(view[done:])
            if got == 0:
                raise EOFError(f"the connection closed after {done} of {size} bytes")
            done += got
        return data
