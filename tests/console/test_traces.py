"""Traces: operations and commands as OpenTelemetry has them, and as a collector gets them."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lilo_engine.config import TRACES_VARIABLES
from lilo_engine.console import otel, traces
from lilo_engine.console.watcher import Unwatched
from lilo_engine.operations.operation import ModelId
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

pytestmark = pytest.mark.anyio


@pytest.fixture
def exported():
    """A watcher and what it exported."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return otel.OpenTelemetryWatcher(provider, exporter), exporter.get_finished_spans


@pytest.fixture
def collector(monkeypatch):
    """A collector that the variables name, and the spans it got."""
    spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name in TRACES_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_COMPRESSION", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield spans
    server.shutdown()
    thread.join()
    server.server_close()


async def test_an_operation_is_a_trace_with_its_command_in_it(build, running, exported):
    watcher, finished = exported
    async with running() as rig:
        rig.engine.recorder.watcher = watcher
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1))
        await rig.do(build.step("m", 2))
        await rig.do(build.save("m", 3))
    by_name = {span.name: span for span in finished()}
    for verb, command in (
        ("forward_backward", "trainer forward_backward"),
        ("optim_step", "trainer optim_step"),
        ("save_state", "trainer capture"),
        ("save_state", "trainer persist"),
    ):
        operation, inside = by_name[verb], by_name[command]
        assert inside.parent.span_id == operation.context.span_id
        assert operation.start_time <= inside.start_time <= inside.end_time <= operation.end_time
        assert operation.status.status_code == StatusCode.UNSET
    assert by_name["forward_backward"].attributes["lilo.request_id"] == "m:1"
    assert by_name["forward_backward"].attributes["lilo.tokens"] == 4
    assert by_name["trainer create"].parent is None


async def test_an_operation_is_a_part_of_its_clients_trace_if_that_has_one(
    build, running, exported
):
    watcher, finished = exported
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with running() as rig:
        rig.engine.recorder.watcher = watcher
        await rig.create(build.model("m"))
        parents = (f"00-{trace_id}-{span_id}-01", "no trace at all", None)
        for number, parent in enumerate(parents, 1):
            request_id = await rig.engine.submit(build.forward_backward("m", number), parent)
            await rig.result(request_id)
    first, *others = [s for s in finished() if s.name == "forward_backward"]
    assert first.context.trace_id == int(trace_id, 16)
    assert first.parent.span_id == int(span_id, 16)
    assert [each.parent for each in others] == [None, None]


async def test_a_shared_command_links_to_each_of_its_operations(build, running, exported):
    watcher, finished = exported
    async with running() as rig:
        rig.engine.recorder.watcher = watcher
        for name in ("a", "b", "c"):
            await rig.create(build.model(name))
        rig.backend.hold("forward_backward")
        first = await rig.engine.submit(build.forward_backward("a", 1))
        await rig.reached("forward_backward")
        ids = [await rig.engine.submit(build.forward_backward(name, 1)) for name in ("b", "c")]
        rig.backend.let_go("forward_backward")
        for request_id in (first, *ids):
            await rig.result(request_id)
    shared = next(s for s in finished() if s.attributes.get("lilo.operations") == 2)
    operations = {
        s.context.span_id for s in finished() if s.attributes.get("lilo.request_id") in ids
    }
    assert {link.context.span_id for link in shared.links} == operations
    assert shared.parent is None
    assert "share loss and config" in shared.attributes["lilo.reason"]


async def test_what_fails_or_is_given_up_ends_as_an_error(build, running, exported):
    watcher, finished = exported
    async with running() as rig:
        rig.engine.recorder.watcher = watcher
        await rig.create(build.model("m"))
        await rig.error(await rig.engine.submit(build.step("m", 1)))
        await rig.engine.submit(build.forward_backward("m", 3))
        await rig.engine.unload(ModelId("m"), "its client left")
    failed = {s.name: s for s in finished() if s.status.status_code == StatusCode.ERROR}
    assert failed["optim_step"].attributes["lilo.error_kind"] == "invalid_request"
    assert "its client left" in failed["forward_backward"].status.description


async def test_a_collector_gets_the_spans_of_a_server_that_stops(build, running, collector):
    watcher = traces.watcher()
    async with running() as rig:
        rig.engine.recorder.watcher = watcher
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1))
    watcher.close()
    assert {"forward_backward", "trainer forward_backward"} <= {span.name for span in collector}


async def test_a_collector_that_is_not_there_holds_up_the_end_for_a_moment_only(
    build, running, monkeypatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    watcher = traces.watcher()
    async with running() as rig:
        rig.engine.recorder.watcher = watcher
        await rig.create(build.model("m"))
    started = time.monotonic()
    watcher.close()
    assert time.monotonic() - started < 4 * otel.CLOSE_LIMIT_S


def test_without_a_collector_nobody_watches(monkeypatch):
    for name in TRACES_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert isinstance(traces.watcher(), Unwatched)
    monkeypatch.setenv(TRACES_VARIABLES[0], "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert isinstance(traces.watcher(), Unwatched)
