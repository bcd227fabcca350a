"""Metrics: totals in Prometheus' text format, made when they are asked for, so that counting costs serving nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

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
from lilo_engine.console.usage_meter import Used
from lilo_engine.engine_client import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PHASES = ("starting", "serving", "restarting", "draining", "stopped")


class EngineMetrics:
    """What one engine did and does."""

    def __init__(
        self,
        recorder: Recorder,
        usage: Mapping[str, Used],
        kept_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        """Read a recorder, a meter's totals by owner, and the sizes of what is kept, whenever asked."""
        self._collector = _EngineCollector(recorder, usage, kept_bytes)
        # A registry of its own, so that several engines of one process do not mix.
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)

    def text(self, state: EngineState) -> str:
        """All of it now."""
        self._collector.state = state
        return generate_latest(self._registry).decode()


class ServerMetrics:
    """What one process that answers HTTP did and holds."""

    def __init__(self, answers: Mapping[int, int]) -> None:
        """Read `answers`, HTTP status -> answers with it, whenever asked."""
        self._collector = _ServerCollector(answers)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)

    def text(self, *, tasks: int, polls: int) -> str:
        """All of it now; `tasks` are those of the event loop, `polls` the requests that wait."""
        self._collector.tasks, self._collector.polls = tasks, polls
        return generate_latest(self._registry).decode()


class _EngineCollector(Collector):
    def __init__(
        self,
        recorder: Recorder,
        usage: Mapping[str, Used],
        kept_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        self._recorder = recorder
        self._usage = usage
        self._kept_bytes = kept_bytes
        self.state: EngineState | None = None

    def collect(self) -> Iterator[Metric]:
        """Every metric of ours."""
        yield from _commands(self._recorder)
        yield from _usage(self._usage)
        yield _kept(self._kept_bytes())
        if self.state is not None:
            yield from _state(self.state)


class _ServerCollector(Collector):
    def __init__(self, answers: Mapping[int, int]) -> None:
        self._answers = answers
        self.tasks = self.polls = 0

    def collect(self) -> Iterator[Metric]:
        """Every metric of ours."""
        answers = CounterMetricFamily(
            "lilo_http_responses", "HTTP responses by status.", labels=["status"]
        )
        for status, count in sorted(self._answers.items()):
            answers.add_metric([str(status)], count)
        yield answers
        yield GaugeMetricFamily("lilo_tasks", "Tasks of the event loop.", value=float(self.tasks))
        words = "Requests that wait for something to happen."
        yield GaugeMetricFamily("lilo_waiting_polls", words, value=float(self.polls))


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


def _usage(usage: Mapping[str, Used]) -> Iterator[Metric]:
    """By owner: `share.share_of_metrics` leaves out the lines of others."""
    tokens = CounterMetricFamily(
        "lilo_usage_tokens", "Tokens by owner of the key.", labels=["owner", "kind"]
    )
    seconds = CounterMetricFamily(
        "lilo_usage_device_seconds",
        "Seconds of the trainer's devices by owner of the key.",
        labels=["owner"],
    )
    for owner, used in sorted(usage.items()):
        tokens.add_metric([owner, "trained"], used.trained_tokens)
        tokens.add_metric([owner, "prompt"], used.prompt_tokens)
        tokens.add_metric([owner, "sampled"], used.sampled_tokens)
        seconds.add_metric([owner], used.device_s)
    yield from (tokens, seconds)


def _kept(sizes: Mapping[str, int]) -> Metric:
    words = "Data of passes that wait or are in no snapshot, by where it lies; uncovered: in no snapshot, wherever."
    found = GaugeMetricFamily("lilo_payload_bytes", words, labels=["where"])
    for where, size in sizes.items():
        found.add_metric([where], size)
    return found


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
