"""Residents: which adapters are loaded in one running engine, never more than it allows.

A request holds its adapter from before it is sent until it has ended. An adapter that nobody holds may be dropped
for another one, the least recently used first; when all are held, newcomers wait. One life: a restarted engine
has an empty memory and gets a new `Residents`.

    loading -> ready <-> held by n requests
                 |
             unloading -> gone
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import anyio

from lilo_engine.commands.threads import in_thread
from lilo_engine.errors import ServerError
from lilo_engine.sampling.engine import SamplingEngine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """One published adapter; its folder never changes."""

    name: str
    """Of the content, and the adapter's name inside an engine: what is published later under the same path has another."""
    folder: str
    """Absolute path of a PEFT folder."""


See: TypeAlias = Callable[[AdapterVersion], str]
"""Brings the folder of an adapter to where it can be read, and says where that is; see `snapshots.py`."""


@dataclass(slots=True, eq=False)
class _Resident:
    state: Literal["loading", "ready", "unloading"] = "loading"
    holders: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)


class Residents:
    """The adapters of one engine."""

    def __init__(
        self,
        engine: SamplingEngine,
        *,
        max_adapters: int,
        load_timeout_s: float,
        see: See | None = None,
    ) -> None:
        """Nothing is loaded. `see` is called from a thread before the engine reads a folder."""
        self._engine = engine
        self._see = see
        self._max_adapters = max_adapters
        self._load_timeout_s = load_timeout_s
        self._adapters: OrderedDict[str, _Resident] = OrderedDict()
        self._freed = anyio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what is loaded or on its way in or out."""
        return tuple(self._adapters)

    @asynccontextmanager
    async def hold(self, version: AdapterVersion) -> AsyncGenerator[str]:
        """Have an adapter loaded while the context lasts; gives its name in the engine.

        Raises:
            UserError: the folder is no adapter for this base model.
            ServerError: loading did not end within the limit, or the engine is gone.
        """
        resident = await self._acquire(version)
        try:
            yield version.name
        finally:
            resident.holders -= 1
            if not resident.holders:
                self._note_freed()

    async def _acquire(self, version: AdapterVersion) -> _Resident:
        key = version.name
        while True:
            resident = self._adapters.get(key)
            if resident is None:
                if len(self._adapters) >= self._max_adapters:
                    await self._make_room()
                    continue
                await self._load(version)
                continue
            if resident.state == "ready":
                resident.holders += 1
                self._adapters.move_to_end(key)
                return resident
            await resident.changed.wait()

    async def _load(self, version: AdapterVersion) -> None:
        resident = self._adapters[version.name] = _Resident()
        loaded = False
        try:
            # Shielded: a load that nobody waits for any more still ends, so that what is loaded is known.
            with anyio.CancelScope(shield=True), anyio.fail_after(self._load_timeout_s):
                folder = version.folder
                if self._see is not None:
                    folder = await in_thread(self._see, version)
                await self._engine.load(version.name, folder)
            loaded = True
        except TimeoutError as error:
            raise ServerError(
                f"adapter {version.name} was not loaded within command_timeout_s = {self._load_timeout_s:g} s"
            ) from error
        finally:
            if loaded:
                resident.state = "ready"
            else:
                del self._adapters[version.name]
                self._note_freed()
            resident.changed.set()

    async def _make_room(self) -> None:
        """Drop the least recently used adapter that nobody holds, or wait until there may be one."""
        for key, resident in self._adapters.items():
            if resident.state == "ready" and not resident.holders:
                await self._unload(key, resident)
                return
        await self._freed.wait()

    async def _unload(self, key: str, resident: _Resident) -> None:
        resident.state, resident.changed = "unloading", anyio.Event()
        try:
            with anyio.CancelScope(shield=True), anyio.fail_after(self._load_timeout_s):
                await self._engine.unload(key)
            _log.info("dropped adapter %s", key)
        except TimeoutError as error:
            raise ServerError(
                f"adapter {key} was not dropped within command_timeout_s = {self._load_timeout_s:g} s"
            ) from error
        finally:
            del self._adapters[key]
            resident.changed.set()
            self._note_freed()

    def _note_freed(self) -> None:
        self._freed.set()
        self._freed = anyio.Event()
