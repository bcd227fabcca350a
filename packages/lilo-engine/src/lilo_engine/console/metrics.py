"""Metrics: totals in Prometheus' text format, made when they are asked for, so that counting costs serving nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lilo_engine.console.recorder import Recorder
from lilo_engine.console.totals import BOUNDS_S
from lilo_engine.engine_client import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PHASES = ("starting", "serving", "restarting", "draining", "stopped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What metrics are read from."""

    recorder: Recorder
    answers: Callable[[], Mapping[int, int]]
    """HTTP status -> answers with it."""


class Metrics:
    """A registry of its own, so that several servers of one process do not mix."""

    def __init__(self, sources: Sources) -> None:
        self._collector = _EngineCollector(sources)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)

    def text(self, state: EngineState, tasks: int) -> bytes:
        """All metrics now; `tasks` are those of the event loop."""
        self._collector.state = state
        self._collector.tasks = tasks
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.state: EngineState | None = None
        self.tasks = 0

    def collect(self) -> Iterator[Metric]:
        """Every metric of ours."""
        yield from _commands(self._sources.recorder)
        answers = CounterMetricFamily(
            "lilo_http_responses", "HTTP responses by status.", labels=["status"]
        )
        for status, count in sorted(self._sources.answers().items()):
            answers.add_metric([str(status)], count)
        yield answers
        yield GaugeMetricFamily("lilo_tasks", "Tasks of the event loop.", value=float(self.tasks))
        if self.state is not None:
            yield from _state(self.state)


def _commands(recorder: Recorder) -> Iterator[Metric]:
    seconds = HistogramMetricFamily(
        "lilo_command_seconds", "Duration of commands of the trainer.", labels=["command"]
    )
    operations = CounterMetricFamily(
        "lilo_operations", "Operations that ended.", labels=["command", "outcome"]
    )
    tokens = CounterMetricFamily("lilo_tokens", "Tokens of passes.", labels=["command"])
    for command, totals in sorted(recorder.totals.items()):
        below = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), totals.histogram, strict=True):
            below += count
            buckets.append((bound, below))
        seconds.add_metric([command], buckets, totals.seconds)
        operations.add_metric([command, "failed"], totals.failed)
        operations.add_metric([command, "done"], totals.operations - totals.failed)
        if totals.tokens:
            tokens.add_metric([command], totals.tokens)
    running = GaugeMetricFamily("lilo_running_commands", "Commands that run.", labels=["lane"])
    for lane in ("gpu", "checkpoint", "publication"):
        count = sum(span.lane == lane for span in recorder.running.values())
        running.add_metric([lane], count)
    yield from (seconds, operations, tokens, running)


def _state(state: EngineState) -> Iterator[Metric]:
    gauges = {
        "lilo_queued_operations": ("Operations that wait.", float(state.queued_operations)),
        "lilo_resident_models": ("Models that are resident.", float(len(state.resident_models))),
        "lilo_trainer_epoch": ("Number of the trainer's life.", float(state.epoch)),
    }
    if state.health is not None:
        age = ("Seconds since the trainer's last progress.", state.health.age_s)
        gauges["lilo_trainer_progress_age_seconds"] = age
    for name, (words, value) in gauges.items():
        yield GaugeMetricFamily(name, words, value=value)
    phase = GaugeMetricFamily("lilo_engine_phase", "1 for the phase it is in.", labels=["phase"])
    for name in _PHASES:
        phase.add_metric([name], float(state.phase == name))
    yield phase
