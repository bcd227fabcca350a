"""Trainers: one trainer after another, each served until it is lost; and what is known of the one that serves now.

It does not know what clients ask (`engine.py` takes that, `work.py` keeps it), nor how a trainer is started
(`commands/supervisor.py`) or used (`serving.py`). `Engine.run` runs it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import anyio

from lilo_engine.commands.command import BackendInfo, Health
from lilo_engine.commands.dispatch import Dispatcher
from lilo_engine.commands.launcher import RunningBackend
from lilo_engine.commands.supervisor import Supervisor
from lilo_engine.commands.threads import in_thread
from lilo_engine.console.recorder import Recorder
from lilo_engine.engine_client import Phase
from lilo_engine.errors import BackendLost, LiloError
from lilo_engine.history.files import Files
from lilo_engine.journal import Journal
from lilo_engine.serving import Serving
from lilo_engine.work import Work

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Trainers:
    """Those of one engine."""

    supervisor: Supervisor
    work: Work
    journal: Journal
    recorder: Recorder
    files: Files
    draining: anyio.Event = field(default_factory=anyio.Event)
    """Set: nothing new is started."""
    stopped: anyio.Event = field(default_factory=anyio.Event)
    """Set by the engine: no trainer runs any more."""
    serving: Serving | None = None
    info: BackendInfo | None = None
    """Of the one that serves."""
    given_up: bool = False
    """None could be started, and none is tried any more."""
    _last_health: Health | None = None
    _answered_s: float = 0.0
    """When it last answered, or started to serve."""

    async def run(self) -> None:
        """Serve until no more can be started or the engine drains."""
        while not self.draining.is_set():
            running = await self.supervisor.start()
            if running is None:
                self.given_up = True
                return
            await self._serve(running)

    @property
    def phase(self) -> Phase:
        """What goes on."""
        if self.stopped.is_set():
            return "stopped"
        if self.draining.is_set():
            return "draining"
        if self.serving is not None:
            return "serving"
        return "starting" if self.supervisor.epoch <= 1 else "restarting"

    async def health(self) -> tuple[Health | None, float]:
        """What the trainer says of its progress, and for how many seconds it has not said anything."""
        serving = self.serving
        if serving is None or self.stopped.is_set():
            return None, 0.0
        try:
            health = await in_thread(serving.running.backend.health)
        except LiloError:
            # A trainer too busy to answer has not made progress either: what is known grows older.
            silent_s = anyio.current_time() - self._answered_s
            if self._last_health is None:
                return None, silent_s
            known = self._last_health
            return replace(known, age_s=known.age_s + silent_s), silent_s
        self._last_health, self._answered_s = health, anyio.current_time()
        return health, 0.0

    async def _serve(self, running: RunningBackend) -> None:
        """One epoch: lanes over a running trainer, then what its loss means."""
        useful = False
        try:
            self.info = await Dispatcher(running.backend).describe()
            self._answered_s = anyio.current_time()
            self.work.residency.open(self.info.slots)
            self.serving = Serving(
                running=running,
                work=self.work,
                journal=self.journal,
                recorder=self.recorder,
                files=self.files,
                draining=self.draining,
            )
            cause = await self.serving.run()
        except LiloError as error:
            cause = error.message
        finally:
            serving, self.serving, self.info = self.serving, None, None
            self._last_health = None
            self.recorder.lost()
            if serving is not None:
                serving.idle.set()
                useful = self.work.residency.num_taken > 0
            with anyio.CancelScope(shield=True):
                await running.stop()
        self.supervisor.lost(cause, useful=useful)
        await self._lose_models(cause)

    async def _lose_models(self, cause: str) -> None:
        reason = f"the trainer was lost: {cause}"
        lost = self.work.lose_trainer()
        for model in lost:
            way = model.gone_with(reason)
            self.work.fail_unfinished(model, BackendLost(way.message))
            self.work.end(model, reason, way)
        for model in self.work.roster.all_ended():
            # What still ran of a model that had ended is lost with the trainer too.
            self.work.fail_unfinished(model, model.gone())
        for model in lost:
            try:
                await self.journal.model_ended(model.model_id, reason)
            except Exception:
                _log.exception("the end of %s could not be recorded", model.model_id)
