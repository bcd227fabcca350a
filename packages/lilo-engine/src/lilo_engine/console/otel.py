"""OpenTelemetry: operations and commands as spans. Needs the extra `[otel]`; `traces.py` imports it when it is wanted.

    forward_backward m:7  |---------- waits ----------|-- runs --|      one trace for each operation, or a part of its client's
      trainer forward_backward                        |----------|      a child of it; links to all of a shared command

A command that several operations share is a trace of its own with a link to each of them. Times are those of the
engine's loop.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from lilo_engine.console.span import Span
from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import ForwardBackward, Operation, Refused, RequestId
from lilo_engine.operations.result import Failed

CLOSE_LIMIT_S = 1.5
"""For the last spans to be taken when the server stops."""
_SERVICE = "lilo-engine"
_PROPAGATOR = TraceContextTextMapPropagator()


def exporting() -> OpenTelemetryWatcher:
    """One that sends to the collector that the standard variables name."""
    # Closed by whoever made it; the SDK's own hook would hold up the end of the process.
    provider = TracerProvider(
        resource=Resource.create({"service.name": _SERVICE}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OpenTelemetryWatcher(provider, exporter)


class OpenTelemetryWatcher:
    """Implements `Watcher`."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter) -> None:
        """Make spans with a provider, which sends them through the exporter; both are closed with it."""
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer(_SERVICE)
        self._operations: dict[RequestId, trace.Span] = {}
        self._commands: dict[int, trace.Span] = {}

    def accepted(self, entry: Entry) -> None:
        """See `Watcher`."""
        if entry.operation is None or entry.request_id in self._operations:
            return
        attributes: dict[str, AttributeValue] = {
            "lilo.model_id": entry.operation.model_id,
            "lilo.request_id": entry.request_id,
            "lilo.seq_id": entry.seq_id,
            "lilo.tokens": entry.tokens,
        }
        # What is no trace of W3C's form is left out, and the span begins a trace of its own.
        theirs = _PROPAGATOR.extract({"traceparent": entry.trace_parent or ""})
        self._operations[entry.request_id] = self._tracer.start_span(
            _verb(entry.operation), context=theirs, attributes=attributes
        )

    def finished(self, entry: Entry) -> None:
        """See `Watcher`."""
        span = self._operations.pop(entry.request_id, None)
        if span is None:
            return
        if isinstance(entry.state, Failed):
            span.set_status(Status(StatusCode.ERROR, entry.state.error.message))
            span.set_attribute("lilo.error_kind", entry.state.error.kind)
        span.end()

    def began(self, span: Span) -> None:
        """See `Watcher`."""
        operations = [self._operations[id] for id in span.request_ids if id in self._operations]
        parent = trace.set_span_in_context(operations[0]) if len(operations) == 1 else None
        links = [Link(one.get_span_context()) for one in operations] if parent is None else []
        attributes: Mapping[str, AttributeValue] = {
            "lilo.lane": span.lane,
            "lilo.models": list(dict.fromkeys(span.model_ids)),
            "lilo.operations": len(span.model_ids),
            "lilo.tokens": span.tokens,
            "lilo.reason": span.reason,
        }
        self._commands[id(span)] = self._tracer.start_span(
            f"trainer {span.command}", context=parent, links=links, attributes=attributes
        )

    def ended(self, span: Span) -> None:
        """See `Watcher`."""
        command = self._commands.pop(id(span), None)
        if command is None:
            return
        if span.failed:
            words = f"{span.failed} of {len(span.model_ids)} operations failed"
            command.set_status(Status(StatusCode.ERROR, words))
        command.end()

    def close(self) -> None:
        """See `Watcher`."""
        # The exporter tries again for long when nobody answers, unless it is told that this is the end.
        end = threading.Timer(CLOSE_LIMIT_S, self._exporter.shutdown)
        end.daemon = True
        end.start()
        self._provider.shutdown()
        end.cancel()


def _verb(operation: Operation) -> str:
    match operation:
        case Refused():
            return operation.verb
        case ForwardBackward(forward_only=True):
            return "forward"
        case _:
            # ForwardBackward -> forward_backward
            name = type(operation).__name__
            return name[0].lower() + "".join(
                f"_{c.lower()}" if c.isupper() else c for c in name[1:]
            )
