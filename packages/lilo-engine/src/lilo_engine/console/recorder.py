"""Recorder: writes down every command while it runs, in memory and bounded.

`serving.py` calls it twice per command, which costs a few microseconds; everything that takes longer (JSON,
Prometheus' text, a Chrome trace) is made from what lies here when somebody asks. Belongs to the engine's event loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lilo_engine.console.run_totals import RunTotals
from lilo_engine.console.span import Command, Span
from lilo_engine.console.totals import Totals
from lilo_engine.console.watcher import Unwatched, Watcher
from lilo_engine.operations.ledger import request_id_of
from lilo_engine.operations.operation import ForwardBackward, ModelId, RequestId
from lilo_engine.schedule.lanes import Lane

KEPT_SPANS = 16384
"""Newest commands of the timeline: some minutes of a busy small trainer, a day of a large one; about 5 MB."""
KEPT_RUNS = 1024
"""Runs whose totals are kept; as many as ended models are remembered."""


@dataclass(slots=True, kw_only=True)
class Recorder:
    """What one engine's lanes did."""

    context: int = 0
    """Longest model input that is accepted, in tokens; a datum that fills it counts as truncated."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds, from any origin."""
    spans: deque[Span] = field(default_factory=lambda: deque[Span](maxlen=KEPT_SPANS))
    """Ended ones, oldest first."""
    running: dict[int, Span] = field(default_factory=dict[int, Span])
    totals: dict[Command, Totals] = field(default_factory=dict[Command, Totals])
    runs: OrderedDict[ModelId, RunTotals] = field(default_factory=OrderedDict[ModelId, RunTotals])
    """By the model's id, the longest silent first."""
    watcher: Watcher = field(default_factory=Unwatched)
    """Told of everything as it happens."""

    def begin(
        self,
        lane: Lane,
        command: Command,
        model_ids: Sequence[ModelId],
        *,
        reason: str = "",
        tokens: int = 0,
        request_ids: tuple[RequestId, ...] = (),
    ) -> Span:
        """A command starts."""
        span = Span(
            lane=lane,
            command=command,
            model_ids=tuple(model_ids),
            reason=reason,
            started_s=self.clock(),
            tokens=tokens,
            request_ids=request_ids,
        )
        self.running[id(span)] = span
        self.watcher.began(span)
        return span

    def begin_passes(self, operations: Sequence[ForwardBackward], reason: str) -> Span:
        """A command of passes starts; their lengths go to the totals of their runs."""
        lengths = [[datum.num_tokens for datum in one.datums] for one in operations]
        tokens = list(map(sum, lengths))
        command: Command = "forward" if operations[0].forward_only else "forward_backward"
        model_ids = [one.model_id for one in operations]
        span = self.begin(
            "gpu",
            command,
            model_ids,
            reason=reason,
            tokens=sum(tokens),
            request_ids=tuple(request_id_of(one.model_id, one.seq_id) for one in operations),
        )
        for model_id, own, own_tokens in zip(model_ids, lengths, tokens, strict=True):
            run = self._run(model_id)
            run.lengths.add(own, self.context)
            # The time of a shared command is everybody's by their tokens.
            run.expect(span, own_tokens)
        return span

    def end(self, span: Span, failed: int = 0, ended_s: float | None = None) -> None:
        """It ended, now if no time is given; so many of its operations with an error."""
        span.ended_s = self.clock() if ended_s is None else ended_s
        span.failed = failed
        self.running.pop(id(span), None)
        self.spans.append(span)
        self.watcher.ended(span)
        took_s = span.ended_s - span.started_s
        totals = self.totals.get(span.command)
        if totals is None:
            totals = self.totals[span.command] = Totals()
        totals.add(took_s, operations=len(span.model_ids), failed=failed, tokens=span.tokens)
        for model_id in dict.fromkeys(span.model_ids):
            self._run(model_id).add(span)

    def lost(self) -> None:
        """The trainer is gone: what ran has failed."""
        for span in list(self.running.values()):
            self.end(span, failed=len(span.model_ids))

    def _run(self, model_id: ModelId) -> RunTotals:
        run = self.runs.get(model_id)
        if run is None:
            run = self.runs[model_id] = RunTotals()
            if len(self.runs) > KEPT_RUNS:
                self.runs.popitem(last=False)
        else:
            self.runs.move_to_end(model_id)
        return run
