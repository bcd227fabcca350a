"""Chrome trace: the timeline of the lanes in the Trace Event Format, as chrome://tracing and Perfetto read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lilo_engine.console.recorder import Recorder
from lilo_engine.console.span import Span
from lilo_engine.schedule.lanes import Lane

_ROWS: dict[Lane, int] = {"gpu": 1, "checkpoint": 2, "publication": 3}


def chrome_trace(recorder: Recorder) -> dict[str, Any]:
    """All spans that are kept, and those that run.

    Returns:
        A JSON object; times are microseconds since the recorder's clock began.
    """
    now_s = recorder.clock()
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "lilo engine"}}
    ]
    for lane, row in _ROWS.items():
        names = {"name": f"{lane} lane"}
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": names})
    events += _events(recorder.spans, now_s)
    events += _events(recorder.running.values(), now_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(spans: Iterable[Span], now_s: float) -> list[dict[str, Any]]:
    return [_event(span, now_s) for span in spans]


def _event(span: Span, now_s: float) -> dict[str, Any]:
    ended_s = now_s if span.ended_s is None else span.ended_s
    models = list(dict.fromkeys(span.model_ids))
    event: dict[str, Any] = {
        "name": f"{span.command} {models[0]}" + (f" +{len(models) - 1}" if models[1:] else ""),
        "cat": span.command,
        "ph": "X",
        "pid": 1,
        "tid": _ROWS[span.lane],
        "ts": 1e6 * span.started_s,
        "dur": 1e6 * (ended_s - span.started_s),
        "args": {
            "models": models,
            "operations": len(span.model_ids),
            "tokens": span.tokens,
            "failed": span.failed,
            "running": span.ended_s is None,
            "reason": span.reason,
        },
    }
    return event
