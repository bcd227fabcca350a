"""Sweeper: what ends by itself: silent sessions with their models, lifetimes of checkpoints, old snapshots.

Each sweep is a function of the time it is given; `run` is the one loop that calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio

from lilo_engine.control.control import Control
from lilo_engine.control.sampling_sessions import target_of
from lilo_engine.engine_client import EngineClient
from lilo_engine.errors import LiloError, NotFound, Unavailable
from lilo_engine.operations.ids import session_of
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.reference import CheckpointRef

_log = logging.getLogger(__name__)


_STRAGGLING_S = 600.0
"""After its session's end, a save that was under way then has opened its sampling session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """When things end."""

    session_idle_s: float = 300.0
    """A client beats every 10 s; five minutes leave room for a laptop that sleeps for a moment."""
    interval_s: float = 10.0
    """Between sweeps: how much later than its limit a thing may end."""
    unnamed_versions: int = 16
    """Snapshots without a name that are kept per run; the definition's."""
    session_kept_s: float = 30 * 86400.0
    """How long an ended session can still be looked at; its runs and checkpoints stay."""


class Samples(Protocol):
    """The sampling side as the end of a session needs it."""

    async def forget(self, session_id: str) -> None:
        """Stop and drop all requests and answers of a sampling session."""
        ...


class SamplesHere(Samples, Protocol):
    """The sampling side in this process."""

    @property
    def adapters_in_use(self) -> frozenset[str]:
        """Names of adapters that a running or waiting sample needs."""
        ...


class Sweeper:
    """Ends what is over."""

    def __init__(
        self,
        control: Control,
        engine: EngineClient,
        samples: SamplesHere,
        settings: SweepSettings,
    ) -> None:
        """Nothing ends before `sweep`."""
        self._control = control
        self._engine = engine
        self._samples = samples
        self._settings = settings
        self._swept_s = 0.0

    async def run(self, clock: Callable[[], float]) -> None:
        """Sweep until cancelled."""
        while True:
            await anyio.sleep(self._settings.interval_s)
            try:
                await self.sweep(clock())
            except Unavailable as error:
                _log.warning("what is over is ended later: %s", error.message)
            except Exception:
                # Isolates the loop from one failed sweep; the next one tries everything again.
                _log.exception("a sweep failed")

    async def sweep(self, now_s: float) -> None:
        """End everything that is over at `now_s`."""
        limit_s = self._settings.session_idle_s
        sessions = self._control.sessions
        # Fronts in other processes heard of sessions too.
        await sessions.flush()
        await sessions.look_again()
        for session_id in sessions.idle(now_s, limit_s):
            # Ending the one before may have taken a while; this one may have been heard of since.
            if not sessions.is_idle(session_id, now_s, limit_s):
                continue
            await end_session(
                self._control,
                self._engine,
                self._samples,
                session_id,
                f"its client was not heard of for {limit_s:.0f} s",
                now_s,
            )
        await self._end_orphans()
        # A save that was under way when its session ended opens a sampling session after it.
        since_s = self._swept_s - _STRAGGLING_S
        for sampling_session_id in await self._control.sampling_sessions.of_ended_since(since_s):
            await self._samples.forget(sampling_session_id)
        self._swept_s = now_s
        await sessions.prune(now_s - self._settings.session_kept_s)
        self._control.sampling_sessions.look_again()
        for entry in await self._control.checkpoints.expired(now_s):
            _log.info("%s reached the end of its lifetime", entry.ref)
            await self._delete(entry.ref)
        kept = self._settings.unnamed_versions
        followed = await self._control.sampling_sessions.followed()
        for run_id in await self._control.checkpoints.runs_with_more_unnamed_than(kept):
            await self._drop_old_snapshots(run_id, followed)
        await self._control.runs.flush()
        await self._control.keys.look_again(now_s)

    async def _end_orphans(self) -> None:
        """End models whose session is over: one that waited for its slot then is in no record that its session has."""
        sessions = self._control.sessions
        for model_id in (await self._engine.state()).resident_models:
            session_id = session_of(model_id)
            if session_id in sessions.alive():
                continue
            # It may have been opened elsewhere since the last look; only the record decides.
            try:
                row = await sessions.get(session_id)
            except NotFound:
                continue
            if row.ended_s is not None:
                await _unload(self._engine, model_id, row.end_reason or "it is over")

    async def _drop_old_snapshots(self, run_id: str, followed: set[CheckpointRef]) -> None:
        entries = await self._control.checkpoints.unnamed_of(run_id)
        old = entries[self._settings.unnamed_versions :]
        in_use = self._samples.adapters_in_use
        for entry in old:
            if target_of(entry).name not in in_use and entry.ref not in followed:
                _log.info("%s is no longer among the newest snapshots of its run", entry.ref)
                await self._delete(entry.ref)

    async def _delete(self, ref: CheckpointRef) -> None:
        try:
            await self._control.delete_checkpoint(ref)
        except Exception:
            # One that cannot be removed must not keep everything behind it; the next sweep tries it again.
            _log.exception("%s could not be removed", ref)


async def end_session(
    control: Control,
    engine: EngineClient,
    samples: Samples,
    session_id: str,
    reason: str,
    now_s: float,
) -> None:
    """End a session, its samples and its models; the first reason wins.

    Raises:
        NotFound: there never was such a session.
    """
    if not await control.sessions.end(session_id, reason, now_s):
        return
    _log.info("session %s ended: %s", session_id, reason)
    for sampling_session_id in await control.sampling_sessions.of_session(session_id):
        await samples.forget(sampling_session_id)
    for run_id in await control.runs.live_of(session_id):
        await _unload(engine, ModelId(run_id), reason)


async def _unload(engine: EngineClient, model_id: ModelId, reason: str) -> None:
    """End a model of a session that is over; the next sweep tries one again that could not be reached."""
    try:
        await engine.unload(model_id, f"its session ended: {reason}")
    except NotFound:
        return
    except LiloError as error:
        _log.warning("model %s was not unloaded: %s", model_id, error)
