"""Sections: what is measured against the bench server; each returns plain numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio

from lilo_engine.bench.client import (
    BenchModel,
    create_model,
    datums,
    http_client,
    percentiles,
    timed,
    timed_now,
    times_ms,
    until_ready,
)
from lilo_engine.bench.scheduling import CALL_BYTES
from lilo_engine.bench.serve import KEY
from lilo_engine.bench.server import BenchServer, bench_server, cpu_s
from lilo_engine.bench.wire import Wire, held_polls
from lilo_engine.bench.wire_model import WireModel

LONG_TOKENS = 250_000
LONG_REQUESTS = 128
LONG_IN_FLIGHT = 4
PARKED = (0, 128, 512)
WAITERS = (0, 512, 2048)
SLOTS = (1, 64)
_LONG_ALONE = 10
_SLOT_BLOCKS, _SLOT_STEPS = 12, 25
_STEPS, _STEP_TURNS = 40, 7
_HEARTBEATS = 60
_CLIENTS = 8


def steps(url: str, pid: int, key: str = KEY) -> dict[str, Any]:
    """Almost empty steps, awaited and pipelined, of one client; and of eight at once.

    One client and eight take turns, so that whatever else the machine does meets both; `eight_clients_against_one` is the
    median over the turns of steps per second of eight by those of one.

    Args:
        url: Of a running server.
        pid: Of its front and engine.
        key: Which it takes.
    """
    data = datums(1, 2)
    awaited: list[float] = []
    rates: dict[int, list[float]] = {1: [], _CLIENTS: []}
    with ExitStack() as stack:
        models = [_wire_model(url, stack, key) for _ in range(_CLIENTS)]
        threads = stack.enter_context(ThreadPoolExecutor(_CLIENTS))
        for model in models:
            times_ms(partial(model.step, data), 5)
        before_s = cpu_s(pid)
        pipelined = timed_now(partial(models[0].pipelined, data), _STEPS)
        cpu_ms = 1e3 * (cpu_s(pid) - before_s) / _STEPS
        for _ in range(_STEP_TURNS):
            for count, found in rates.items():
                started = time.perf_counter()
                running = [
                    threads.submit(times_ms, partial(model.step, data), _STEPS)
                    for model in models[:count]
                ]
                times = [client.result() for client in running]
                found.append(count * _STEPS / (time.perf_counter() - started))
                if count == 1:
                    awaited += times[0]
    return {
        "awaited": percentiles(awaited),
        "pipelined": {**pipelined, "cpu_ms_per_step": cpu_ms},
        "eight_clients_steps_per_s": statistics.median(rates[_CLIENTS]),
        "eight_clients_against_one": statistics.median(
            eight / one for eight, one in zip(rates[_CLIENTS], rates[1], strict=True)
        ),
    }


def parked(server: BenchServer) -> dict[str, Any]:
    """Heartbeats while calls of 76 KB are parked behind a number that does not come."""
    # 20 bytes a token: int32 ids, int64 targets, two float32 columns.
    data = datums(1, CALL_BYTES // 20)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        model = _wire_model(server.url, stack)
        model.skip_number()
        there = 0
        for count in PARKED:
            for _ in range(count - there):
                model.forward_backward(data)
            there = count
            found[str(count)] = {"parked_bytes": count * len(data), **_heartbeats(server, model)}
    return found


def waiters(server: BenchServer) -> dict[str, Any]:
    """Heartbeats while clients wait on futures that do not finish."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        model = _wire_model(server.url, stack)
        model.skip_number()
        request_ids = [model.forward_backward(datums(1, 2)) for _ in range(64)]
        for count in WAITERS:
            with held_polls(server.url, request_ids, count):
                found[str(count)] = _heartbeats(server, model)
    return found


def _heartbeats(server: BenchServer, model: WireModel) -> dict[str, float]:
    timed_now(model.heartbeat, 5)
    before_s = server.cpu_s()
    beats = timed_now(model.heartbeat, _HEARTBEATS)
    return {**beats, "cpu_ms": 1e3 * (server.cpu_s() - before_s) / _HEARTBEATS}


async def long_requests(server: BenchServer) -> dict[str, Any]:
    """Requests of one datum of 250k tokens: alone, and a stream of 128 with a few in flight."""
    data = datums(1, LONG_TOKENS)
    async with _models(server, 1) as (model,):

        async def one() -> None:
            await model.finished(await model.forward_backward(data))

        await timed(one, 2)
        peaks: list[int] = []

        async def watched() -> None:
            server.forget_peak()
            before = server.rss_bytes()
            await one()
            peaks.append(server.peak_bytes() - before)

        alone = await timed(watched, _LONG_ALONE)
        left = LONG_REQUESTS
        before = server.rss_bytes()
        server.forget_peak()
        started = time.perf_counter()

        async def stream() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await one()

        async with anyio.create_task_group() as tasks:
            for _ in range(LONG_IN_FLIGHT):
                tasks.start_soon(stream)
        took_s = time.perf_counter() - started
        stream_bytes = server.peak_bytes() - before
    return {
        "request_bytes": len(data),
        "alone": alone,
        "alone_peak_by_request_bytes": statistics.median(peaks) / len(data),
        "stream_requests": LONG_REQUESTS,
        "stream_ms_per_request": 1e3 * took_s / LONG_REQUESTS,
        # With the results that are kept for a client that asks again, up to a limit (`operations/ledger.py`).
        "stream_peak_bytes": stream_bytes,
    }


async def slots() -> dict[str, Any]:
    """Processor time of a step of one model, with one slot and with 64 that are taken."""
    data = datums(8, 128)
    cpu_ms: dict[int, list[float]] = {count: [] for count in SLOTS}
    async with AsyncExitStack() as stack:
        rigs: dict[int, tuple[BenchServer, BenchModel]] = {}
        for count in SLOTS:
            server = stack.enter_context(bench_server(slots=count))
            models = await stack.enter_async_context(_models(server, count))
            rigs[count] = (server, models[0])
            await timed(partial(models[0].step, data), 10)
        # In turns, so that whatever else the machine does meets both.
        for _ in range(_SLOT_BLOCKS):
            for count, (server, model) in rigs.items():
                before_s = server.cpu_s()
                await timed(partial(model.step, data), _SLOT_STEPS)
                cpu_ms[count].append(1e3 * (server.cpu_s() - before_s) / _SLOT_STEPS)
    found = {count: statistics.median(values) for count, values in cpu_ms.items()}
    one, many = (found[count] for count in SLOTS)
    cases = {str(count): {"cpu_ms_per_step": value} for count, value in found.items()}
    return {**cases, "cpu_ratio": many / one}


def _wire_model(url: str, stack: ExitStack, key: str = KEY) -> WireModel:
    wire = stack.enter_context(Wire(url, key))
    wire.until_ready()
    return WireModel.create(wire)


@asynccontextmanager
async def _models(server: BenchServer, count: int) -> AsyncGenerator[list[BenchModel]]:
    async with http_client(server.url) as http:
        await until_ready(http)
        yield [await create_model(http) for _ in range(count)]
