"""Recorder and what is made of it: totals, timeline, reports, overview, over a real engine."""

import asyncio
import threading
import time

import anyio
import pytest
from lilo_engine.console.chrome_trace import chrome_trace
from lilo_engine.console.metrics import EngineMetrics, ServerMetrics
from lilo_engine.console.recorder import KEPT_SPANS, Recorder
from lilo_engine.console.run_report import run_report
from lilo_engine.operations.operation import ModelId

from tests.engine.conftest import HeldBackend

pytestmark = pytest.mark.anyio


async def train(rig, build, name, steps=2):
    await rig.create(build.model(name))
    for number in range(1, 2 * steps, 2):
        await rig.do(build.forward_backward(name, number))
        await rig.do(build.step(name, number + 1))
    await rig.do(build.publish(name, 2 * steps + 1))


async def test_counts_add_up_to_what_was_asked(build, running):
    async with running() as rig:
        await train(rig, build, "m")
        await rig.error(await rig.engine.submit(build.step("m", 6)))
        totals = rig.engine.recorder.totals
        assert {name: (t.operations, t.failed) for name, t in totals.items()} == {
            "create": (1, 0),
            "forward_backward": (2, 0),
            "optim_step": (3, 1),
            "capture": (1, 0),
            "persist": (1, 0),
        }
        assert totals["forward_backward"].tokens == 8
        assert all(sum(t.histogram) == t.commands for t in totals.values())


async def test_the_timeline_has_every_command_on_its_lane_with_the_reason(build, running):
    async with running() as rig:
        await train(rig, build, "m", steps=1)
        document = chrome_trace(rig.engine.recorder)
        rows = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
        events = [e for e in document["traceEvents"] if e["ph"] == "X"]
        assert [(e["cat"], rows[e["tid"]]) for e in events] == [
            ("create", "gpu lane"),
            ("forward_backward", "gpu lane"),
            ("optim_step", "gpu lane"),
            ("capture", "gpu lane"),
            ("persist", "publication lane"),
        ]
        assert all(e["dur"] >= 0 for e in events)
        assert "turn of m" in events[1]["args"]["reason"]


async def test_a_command_that_runs_is_shown_with_what_waits_behind_it_and_why(build, running):
    async with running() as rig:
        await rig.create(build.model("a"))
        await rig.create(build.model("b"))
        rig.backend.hold("forward_backward")
        first = await rig.engine.submit(build.forward_backward("a", 1))
        await rig.reached("forward_backward")
        await rig.engine.submit(build.forward_backward("a", 2))
        late = await rig.engine.submit(build.step("b", 2))
        seen = rig.engine.overview()
        (running_now,) = seen["lanes"]["gpu"]
        assert (running_now["command"], running_now["models"]) == ("forward_backward", ["a"])
        queue = {row["model_id"]: row for row in seen["queue"]}
        assert queue["a"]["waiting"] == 1
        assert "turn" in queue["a"]["reason"]
        assert queue["b"]["reason"] == "number 1 has not come"
        assert [model["phase"] for model in seen["models"]] == ["ready", "ready"]
        (event,) = [e for e in chrome_trace(rig.engine.recorder)["traceEvents"] if e["ph"] == "X"][
            -1:
        ]
        assert event["args"]["running"]
        rig.backend.let_go("forward_backward")
        await rig.result(first)
        await rig.do(build.forward_backward("b", 1))
        await rig.result(late)
        assert rig.engine.overview()["queue"] == []


async def test_a_shared_command_is_counted_to_each_run_by_its_tokens(build, running):
    async with running() as rig:
        for name in ("a", "b", "gate"):
            await rig.create(build.model(name))
        rig.backend.hold("forward_backward")
        await rig.engine.submit(build.forward_backward("gate", 1))
        await rig.reached("forward_backward")
        ids = [
            await rig.engine.submit(build.forward_backward("a", 1, datums=(build.datum(n=300),))),
            await rig.engine.submit(build.forward_backward("b", 1, datums=(build.datum(n=100),))),
        ]
        rig.backend.let_go("forward_backward")
        for request_id in ids:
            await rig.result(request_id)
        runs = rig.engine.recorder.runs
        a, b = (run_report(n, runs[ModelId(n)], num_devices=1) for n in "ab")
        assert (a.tokens, b.tokens) == (300, 100)
        assert a.train_s == pytest.approx(3 * b.train_s)
        assert a.lengths == {"256-511": 1}
        assert a.wall_s >= a.train_s > 0
        assert a.truncated_share == 0.0


class StepsAhead(HeldBackend):
    """Its steps take 5 ms of a clock of its own, and the loop hears of none before the last is done."""

    now_s = 0.0

    def stall(self, loop, steps):
        self.left, self.last, self.loop = steps, threading.Event(), loop

    def optim_step(self, model_id, params):
        if self.last is not None:
            self.loop.call_soon_threadsafe(self.last.wait, 10)
            self.last, self.ended = None, self.last
        metrics = super().optim_step(model_id, params)
        self.now_s += 0.005
        self.left -= 1
        if self.left == 0:
            self.ended.set()
        return metrics


async def test_steps_that_run_ahead_of_the_loop_have_their_own_times(build, running):
    names = ("a", "b", "c", "d")
    async with running(factory=StepsAhead) as rig:
        for name in names:
            await rig.create(build.model(name))
        backend, recorder = rig.backend, rig.engine.recorder
        recorder.clock = lambda: backend.now_s
        backend.stall(asyncio.get_running_loop(), len(names))
        backend.hold("forward_backward")
        ids = []
        for name in names:
            await rig.engine.submit(build.forward_backward(name, 1))
            ids.append(await rig.engine.submit(build.step(name, 2)))
        await rig.reached("forward_backward")
        backend.let_go("forward_backward")
        for request_id in ids:
            await rig.result(request_id)
        took = [s.ended_s - s.started_s for s in recorder.spans if s.command == "optim_step"]
        assert took == pytest.approx([0.005] * 4)
        assert [recorder.runs[name].seconds["optim_step"] for name in names] == pytest.approx(took)


async def test_datums_that_fill_the_context_count_as_truncated(build, running, tiny):
    async with running() as rig:
        await rig.create(build.model("m"))
        datums = (build.datum(n=tiny.context), build.datum(n=8))
        await rig.do(build.forward_backward("m", 1, datums=datums))
        report = run_report("m", rig.engine.recorder.runs[ModelId("m")], num_devices=2)
        assert report.truncated_share == 0.5
        assert report.longest_tokens == tiny.context
        assert report.tokens_per_device_s == pytest.approx(report.tokens / report.train_s / 2)


async def test_what_ran_when_the_trainer_was_lost_counts_as_failed(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.hold("forward_backward")
        lost = await rig.engine.submit(build.forward_backward("m", 1))
        await rig.reached("forward_backward")
        rig.launcher.started[-1].lose("the power went")
        await rig.error(lost)
        rig.backend.let_go("forward_backward")
        await rig.create(build.model("n"))
        totals = rig.engine.recorder.totals["forward_backward"]
        assert (totals.operations, totals.failed) == (1, 1)
        assert rig.engine.recorder.running == {}


async def test_metrics_are_text_that_prometheus_reads(build, running):
    async with running() as rig:
        await train(rig, build, "m")
        text = EngineMetrics(rig.engine.recorder, {}, rig.engine.kept_bytes).text(
            await rig.engine.state()
        )
    text += ServerMetrics({200: 3}).text(tasks=7, polls=2)
    assert 'lilo_operations_total{command="optim_step",outcome="done"} 2.0' in text
    assert 'lilo_command_seconds_bucket{command="persist",le="+Inf"} 1.0' in text
    assert 'lilo_http_responses_total{status="200"} 3.0' in text
    assert "lilo_resident_models 1.0" in text
    assert "lilo_tasks 7.0" in text
    assert 'lilo_engine_phase{phase="serving"} 1.0' in text


def test_the_timeline_is_bounded_and_a_command_costs_microseconds():
    recorder = Recorder(context=16)
    model = (ModelId("m"),)
    started = time.process_time()
    for _ in range(KEPT_SPANS + 100):
        recorder.end(recorder.begin("gpu", "optim_step", model, reason="turn of m"))
    cost_s = (time.process_time() - started) / (KEPT_SPANS + 100)
    assert len(recorder.spans) == KEPT_SPANS
    assert recorder.totals["optim_step"].commands == KEPT_SPANS + 100
    assert cost_s < 50e-6


async def test_asking_for_everything_does_not_disturb_what_runs(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        ids = [await rig.engine.submit(build.forward_backward("m", n)) for n in range(1, 65)]
        async with anyio.create_task_group() as tasks:

            async def look():
                for _ in range(20):
                    rig.engine.overview()
                    chrome_trace(rig.engine.recorder)
                    await anyio.lowlevel.checkpoint()

            tasks.start_soon(look)
        for request_id in ids:
            await rig.result(request_id)
