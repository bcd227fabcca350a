"""Files: writes passes into segments while memory is short, and reads them back when their turn comes.

    writer      waits for: something to write or to free       unblocked by: `Payloads.on_change`

Files are touched in threads; which passes, `payloads.py` decides. A disk that takes nothing more does not stop the
engine: passes stay in memory, the log says so, and writing is tried again.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.to_thread

from lilo_engine.commands import frames
from lilo_engine.errors import CommandFailed
from lilo_engine.history.payloads import Payloads
from lilo_engine.history.record import Done, Pass, Payload, PlanRecord
from lilo_engine.history.segments import Place, Segments
from lilo_engine.operations.operation import ForwardBackward, OptimStep

Repeated: TypeAlias = ForwardBackward | OptimStep

_log = logging.getLogger(__name__)

RETRY_S = 30.0
"""After the disk refused a write."""


def own_folder() -> Path:
    """A folder for segments of an engine that was given none; made when something is written."""
    return Path(tempfile.gettempdir()) / f"lilo-segments-{uuid.uuid4().hex[:12]}"


class Files:
    """The segments of one engine."""

    def __init__(self, payloads: Payloads, segments: Segments) -> None:
        """Nothing is written before `run`."""
        self._payloads = payloads
        self._segments = segments
        self._news = anyio.Event()
        self._caught_up = anyio.Event()
        payloads.on_change = self._notify

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return self._segments.size_bytes

    async def run(self) -> None:
        """Write and free until cancelled; then remove everything."""
        await anyio.to_thread.run_sync(self._segments.clear)
        try:
            while True:
                self._news = anyio.Event()
                released = self._payloads.take_released()
                if released:
                    await anyio.to_thread.run_sync(self._free, released)
                    continue
                # Chosen when nothing waits any more: meanwhile it could have been given up.
                payload = self._payloads.to_write()
                if payload is not None:
                    await self._write(payload)
                else:
                    self._caught_up.set()
                    await self._news.wait()
        finally:
            self._segments.close()

    async def operation(self, payload: Payload) -> ForwardBackward:
        """The pass, from memory or from its file.

        Raises:
            CommandFailed: its file cannot be read.
        """
        if payload.operation is not None:
            return payload.operation
        place = payload.place
        assert place is not None, "what is not in memory was written"
        try:
            return await anyio.to_thread.run_sync(self._read, place)
        except (OSError, frames.FrameError) as error:
            raise CommandFailed(
                f"the data of this pass could not be read back from {self._segments.folder}: {error}; send it again"
            ) from error

    async def repeat(self, done: Iterable[Done]) -> AsyncGenerator[tuple[PlanRecord, Repeated]]:
        """What was done to a model, one operation after another, each with the plan it ran in.

        Raises:
            CommandFailed: the data of one cannot be read.
        """
        for one in done:
            if isinstance(one, Pass):
                yield one.plan, await self.operation(one.payload)
            else:
                yield one.plan, one.operation

    async def caught_up(self) -> None:
        """Return when what belongs into files lies there, and what is not needed is gone."""
        await self._caught_up.wait()

    def _notify(self) -> None:
        if self._caught_up.is_set():
            self._caught_up = anyio.Event()
        self._news.set()

    async def _write(self, payload: Payload) -> None:
        operation = payload.operation
        assert operation is not None, "only what is in memory is written"
        try:
            place = await anyio.to_thread.run_sync(self._append, operation)
        except OSError as error:
            _log.warning(
                "%s takes no more payloads (%s); they stay in memory", self._segments.folder, error
            )
            await anyio.sleep(RETRY_S)
            return
        self._payloads.written(payload, place)

    def _append(self, operation: ForwardBackward) -> Place:
        return self._segments.append(frames.encode(operation))

    def _read(self, place: Place) -> ForwardBackward:
        operation = frames.decode(self._segments.read(place))
        assert isinstance(operation, ForwardBackward), "only passes are written"
        return operation

    def _free(self, places: list[Place]) -> None:
        for place in places:
            self._segments.release(place)
