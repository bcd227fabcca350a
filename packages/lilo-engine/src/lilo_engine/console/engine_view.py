"""EngineView: what a console asks of an engine: in-process on a laptop, over HTTP otherwise. Plain values; reads only."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

from lilo_engine.console.chrome_trace import chrome_trace
from lilo_engine.console.metrics import EngineMetrics
from lilo_engine.console.run_report import run_report
from lilo_engine.console.usage_meter import UsageMeter
from lilo_engine.engine import Engine
from lilo_engine.errors import LiloError, NotFound
from lilo_engine.operations.operation import ModelId


class EngineView(Protocol):
    """One engine, as a console sees it."""

    async def overview(self) -> dict[str, Any]:
        """What waits and why, what runs, and which models there are."""
        ...

    async def timeline(self) -> dict[str, Any]:
        """What the lanes did, as a Chrome trace."""
        ...

    async def report(self, run_id: str) -> dict[str, Any]:
        """Where a run's time went.

        Raises:
            NotFound: nothing of it ran since the engine started.
        """
        ...

    async def metrics(self) -> str:
        """The engine's own metrics in Prometheus' text format."""
        ...


def nothing_ran(run_id: str) -> str:
    """What to answer for a run that the engine has not worked for, or that is not the caller's."""
    return (
        f"nothing of a run {run_id!r} ran since this server started; "
        "GET /api/v1/training_runs lists the runs there are"
    )


class LocalView:
    """Implements `EngineView` over the engine in this process."""

    def __init__(self, engine: Engine, meter: UsageMeter) -> None:
        """Look at an engine and at what its owners used."""
        self._engine = engine
        self._meter = meter
        self._metrics = EngineMetrics(engine.recorder, meter.totals, engine.kept_bytes)

    async def overview(self) -> dict[str, Any]:
        """See `EngineView`."""
        return self._engine.overview()

    async def timeline(self) -> dict[str, Any]:
        """See `EngineView`."""
        return chrome_trace(self._engine.recorder)

    async def report(self, run_id: str) -> dict[str, Any]:
        """See `EngineView`."""
        totals = self._engine.recorder.runs.get(ModelId(run_id))
        if totals is None:
            raise NotFound(nothing_ran(run_id))
        return run_report(run_id, totals, num_devices=self._meter.num_devices).as_dict()

    async def metrics(self) -> str:
        """See `EngineView`."""
        # Usage of owners who cannot be looked up now comes later; the rest is told all the same.
        with suppress(LiloError):
            await self._meter.look()
        return self._metrics.text(await self._engine.state())
