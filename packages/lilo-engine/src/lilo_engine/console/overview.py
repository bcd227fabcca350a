"""Overview: what an engine is doing right now, for a console: its queue with reasons, its lanes, its models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lilo_engine.console.recorder import Recorder
from lilo_engine.console.span import Span
from lilo_engine.operations.roster import Model
from lilo_engine.schedule.scheduler import Scheduler
from lilo_engine.slots import Slots


def overview(
    models: Sequence[Model], scheduler: Scheduler, slots: Slots, recorder: Recorder
) -> dict[str, Any]:
    """All of it, as plain values."""
    return {
        "queue": _queue(models, scheduler),
        "lanes": _lanes(recorder, scheduler),
        "models": [_model(model, slots) for model in models],
    }


def _queue(models: Iterable[Model], scheduler: Scheduler) -> list[dict[str, Any]]:
    """Models with waiting operations, and why the next one of each has not started."""
    return [
        {
            "model_id": model.model_id,
            "waiting": len(model.ledger.sequence),
            "next_seq_id": model.ledger.sequence.next,
            "passed_over": scheduler.order.passed_over(model.model_id),
            "reason": scheduler.why_waiting(model.model_id),
        }
        for model in models
        if len(model.ledger.sequence)
    ]


def _lanes(recorder: Recorder, scheduler: Scheduler) -> dict[str, Any]:
    """What runs on each lane."""
    now_s = recorder.clock()
    running: dict[str, list[dict[str, Any]]] = {"gpu": [], "checkpoint": [], "publication": []}
    for span in recorder.running.values():
        running[span.lane].append(_running(span, now_s))
    return {
        **running,
        "publication_workers": scheduler.lanes.publication_workers,
        "max_batch_tokens": scheduler.budget.max_tokens,
        "max_forward_backward_batch": scheduler.budget.max_requests,
    }


def _model(model: Model, slots: Slots) -> dict[str, Any]:
    """A model that has not ended, with a slot or without."""
    last = model.last_checkpoint
    return {
        "model_id": model.model_id,
        "phase": model.phase,
        "waits_for": slots.why_waiting(model),
        "session_id": model.request.session_id,
        "lora_rank": model.request.lora.lora_rank,
        "operations_begun": model.ledger.sequence.next - 1,
        "window_passes": model.window.passes,
        "window_failure": model.window.failure,
        "last_checkpoint": None if last is None else str(last),
    }


def _running(span: Span, now_s: float) -> dict[str, Any]:
    return {
        "command": span.command,
        "models": list(dict.fromkeys(span.model_ids)),
        "operations": len(span.model_ids),
        "tokens": span.tokens,
        "reason": span.reason,
        "running_s": now_s - span.started_s,
    }
