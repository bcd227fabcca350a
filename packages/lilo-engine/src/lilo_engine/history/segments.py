"""Segments: payloads in append-only files, each file removed as soon as nothing in it is needed. Blocking; one folder.

    segment-000007    frame frame frame ...      written from the start to the end, read anywhere, never changed

What lies here belongs to models of this process and dies with them, so that nothing is synced to the disk, and what an
earlier process left is removed. Which payloads are needed is `history.py`'s to know.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

_NAME = "segment-{:06d}"
_PATTERN = "segment-*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one payload lies."""

    segment: int
    offset: int
    length: int
    """In bytes."""


@dataclass(slots=True, kw_only=True)
class _Segment:
    path: Path
    fd: int
    size: int = 0
    live_bytes: int = 0
    """Of payloads that are still needed."""


@dataclass(slots=True)
class Segments:
    """Payload files of one engine. Every method may be called from any thread."""

    folder: Path
    segment_bytes: int = 64 * 2**20
    """From this size on a new file is begun; a payload is never split."""
    _open: dict[int, _Segment] = field(default_factory=dict[int, _Segment])
    _last: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, payload: bytes) -> Place:
        """Write one payload.

        Raises:
            OSError: the disk is full, say; nothing of it counts as written.
        """
        with self._lock:
            segment = self._current()
            offset = segment.size
            view, done = memoryview(payload), 0
            while done < len(view):
                done += os.pwrite(segment.fd, view[done:], offset + done)
            segment.size += len(payload)
            segment.live_bytes += len(payload)
            return Place(segment=self._last, offset=offset, length=len(payload))

    def read(self, place: Place) -> bytes:
        """A payload that was not released.

        Raises:
            OSError: it cannot be read, or is not all there.
        """
        with self._lock:
            segment = self._open.get(place.segment)
            if segment is None:
                raise OSError(f"{_NAME.format(place.segment)} in {self.folder} was removed")
            fd = os.dup(segment.fd)
        try:
            data = bytearray()
            while len(data) < place.length:
                piece = os.pread(fd, place.length - len(data), place.offset + len(data))
                if not piece:
                    raise OSError(
                        f"{_NAME.format(place.segment)} in {self.folder} ends before the payload at {place.offset}; "
                        "something else changed the file"
                    )
                data += piece
            return bytes(data)
        finally:
            os.close(fd)

    def release(self, place: Place) -> None:
        """A payload is not needed any more; its file goes with the last one in it."""
        with self._lock:
            segment = self._open[place.segment]
            segment.live_bytes -= place.length
            if segment.live_bytes == 0:
                self._remove(place.segment)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        with self._lock:
            return sum(segment.size for segment in self._open.values())

    def clear(self) -> None:
        """Remove everything, also what an earlier process left."""
        with self._lock:
            for number in list(self._open):
                self._remove(number)
            for left in self.folder.glob(_PATTERN):
                left.unlink(missing_ok=True)

    def close(self) -> None:
        """The same, and the folder too unless something else lies in it."""
        self.clear()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _current(self) -> _Segment:
        """The file that is written now."""
        segment = self._open.get(self._last)
        if segment is not None and segment.size < self.segment_bytes:
            return segment
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _NAME.format(self._last + 1)
        segment = _Segment(path=path, fd=os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
        self._last += 1
        self._open[self._last] = segment
        return segment

    def _remove(self, number: int) -> None:
        segment = self._open.pop(number)
        os.close(segment.fd)
        segment.path.unlink(missing_ok=True)
