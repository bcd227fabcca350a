"""Soak: 30 minutes of mixed load with killed clients and one killed backend; nothing leaks, counters add up (--minutes N)."""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections import Counter, deque
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field

import anyio
import httpx
import psutil
from _proof import Proof, tiny_server
from lilo_engine.bench.client import BenchModel, create_model, datums, http_client
from lilo_engine.demo.server import LocalServer

CLIENTS = 8
TRAINER = "lilo_engine.commands.serve_backend"
LOOK_S = 3.0
"""Between looks at the server's memory, files and tasks."""
VANISHING_SHARE = 0.08
"""Lives of a client that end by being killed in the middle of a request."""
SILENT_S, MOST_SILENT = 310.0, 20
"""A killed client's model keeps its slot while its session may still come back, 300 s: of 32 slots so many at most, or the
faster the server is, the longer the clients that live would wait for one."""
KILL_WINDOW_S = 20.0
"""After the backend was killed: it is started again within this."""
SETTLE_S = 5.0
RSS_GROWTH = 1.10
RSS_SLACK_BYTES = 24 * 2**20
"""Results that were fetched are kept up to a limit of bytes, which fills in the course of the run."""
LARGEST_PASS_BYTES = 4 * (64 * 20 + 1024)
"""Four datums of 64 tokens, as the engine counts them."""
SLACK = 12
"""Files and tasks: connections of clients that were just cut off."""


@dataclass
class _Soak:
    """What the clients did and saw."""

    server: LocalServer
    ends_s: float
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    sent: Counter[str] = field(default_factory=Counter)
    """Operations that were accepted, by command."""
    done: Counter[str] = field(default_factory=Counter)
    """Operations whose result a client has."""
    failed: Counter[str] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)
    silent_since_s: deque[float] = field(default_factory=deque)
    """When clients were killed whose models may still hold slots."""
    problems: list[str] = field(default_factory=list)
    killed_s: float = float("inf")
    looks: list[dict[str, float]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends_s

    @property
    def around_the_kill(self) -> bool:
        return self.killed_s - 1 <= time.monotonic() <= self.killed_s + KILL_WINDOW_S

    def problem(self, words: str) -> None:
        if not self.around_the_kill:
            self.problems.append(words)

    # Clients.

    async def client(self) -> None:
        """Live again and again until the time is over."""
        while not self.over:
            async with http_client(self.server.base_url, key=self.server.api_key) as http:
                with anyio.CancelScope() as life:
                    try:
                        await self.live(http, life)
                    except* (httpx.HTTPError, RuntimeError, KeyError, TimeoutError) as group:
                        self.lives["cut short"] += 1
                        error = _first(group)
                        self.problem(f"{type(error).__name__}: {str(error)[:200]}")
                        await anyio.sleep(1.0)

    async def live(self, http: httpx.AsyncClient, life: anyio.CancelScope) -> None:
        model = await create_model(http)
        vanishes = self.chance.random() < VANISHING_SHARE and self.may_kill()
        async with anyio.create_task_group() as tasks:
            if vanishes:
                tasks.start_soon(self.kill_client, life)
            for number in range(self.chance.randint(4, 12)):
                if self.over:
                    break
                await self.round(model, number)
            tasks.cancel_scope.cancel()
        await http.post(f"sessions/{model.session_id}/finish", json={})
        self.lives["ended well"] += 1

    def may_kill(self) -> bool:
        now_s = time.monotonic()
        while self.silent_since_s and self.silent_since_s[0] < now_s - SILENT_S:
            self.silent_since_s.popleft()
        if len(self.silent_since_s) >= MOST_SILENT:
            return False
        self.silent_since_s.append(now_s)
        return True

    async def kill_client(self, life: anyio.CancelScope) -> None:
        await anyio.sleep(self.chance.uniform(0.05, 2.0))
        self.lives["killed"] += 1
        life.cancel()

    async def round(self, model: BenchModel, number: int) -> None:
        data = datums(self.chance.randint(1, 4), self.chance.randint(8, 64))
        ids = {
            "forward_backward": await self.submit("forward_backward", model.forward_backward(data))
        }
        ids["optim_step"] = await self.submit("optim_step", model.optim_step())
        for command, request_id in ids.items():
            await self.result(model, command, request_id)
        drawn = self.chance.random()
        if drawn < 0.15:
            await self.save(model, "save_weights", {"path": f"state-{number}"})
        elif drawn < 0.45:
            body = {"sampling_session_seq_id": number}
            saved = await self.save(model, "save_weights_for_sampler", body)
            if saved is not None:
                await self.sample(model, saved["sampling_session_id"])
        await model.heartbeat()

    async def save(self, model: BenchModel, path: str, body: Mapping[str, object]) -> dict | None:
        request_id = await self.submit("persist", model.submit_json(path, body))
        return await self.result(model, "persist", request_id)

    async def sample(self, model: BenchModel, sampling_session_id: str) -> None:
        for number in range(2):
            body = {
                "sampling_session_id": sampling_session_id,
                "seq_id": number,
                "num_samples": 2,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [50, 51, 52]}]},
                "sampling_params": {"max_tokens": 8, "seed": number},
            }
            answer = await model.http.post("asample", json=body)
            answer.raise_for_status()
            await self.result(model, "sample", answer.json()["request_id"])

    async def submit(self, command: str, sending: Awaitable[str]) -> str:
        # Counted before it is sent: a killed client does not know whether it arrived.
        self.sent[command] += 1
        return await sending

    async def result(self, model: BenchModel, command: str, request_id: str) -> dict | None:
        with anyio.fail_after(90):
            while True:
                answer = await model.http.post("retrieve_future", json={"request_id": request_id})
                if answer.status_code != 408:
                    break
        answer.raise_for_status()
        body = answer.json()
        if "error" in body:
            self.failed[command] += 1
            raise RuntimeError(f"{command} failed: {body['error']}")
        self.done[command] += 1
        return body

    # The rest of the world.

    async def watch(self) -> None:
        """Look at the server now and then."""
        while not self.over:
            self.looks.append(await self.look())
            await anyio.sleep(LOOK_S)

    async def look(self) -> dict[str, float]:
        process = psutil.Process(self.server.pid)
        metrics = await self.metrics()
        return {
            "at_s": time.monotonic(),
            "rss of the server": float(process.memory_info().rss),
            "rss of the sampler": self.rss_of_child("lilo_engine.sampling.host"),
            "rss of the trainer": self.rss_of_child(TRAINER),
            "files": float(process.num_fds()),
            "threads": float(process.num_threads()),
            "tasks": metrics["lilo_tasks"],
        }

    def rss_of_child(self, module: str) -> float:
        """Zero while it is not there."""
        try:
            return float(sum(p.memory_info().rss for p in self.children(module)))
        except psutil.Error:
            return 0.0

    def children(self, module: str) -> list[psutil.Process]:
        children = psutil.Process(self.server.pid).children(recursive=True)
        return [child for child in children if module in " ".join(child.cmdline())]

    async def metrics(self) -> dict[str, float]:
        headers = {"X-API-Key": self.server.api_key}
        async with httpx.AsyncClient(base_url=self.server.base_url, timeout=30) as http:
            text = (await http.get("/metrics", headers=headers)).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def kill_backend(self, after_s: float) -> None:
        """Kill the trainer once, in the middle of the run."""
        await anyio.sleep(after_s)
        for child in self.children(TRAINER):
            self.killed_s = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)


def _first(group: BaseExceptionGroup) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def main() -> None:
    """Run, settle, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    proof = Proof("soak")
    with proof.part("soak"), tiny_server() as server:
        anyio.run(_soak, proof, server, 60 * minutes)
    proof.end()


async def _soak(proof: Proof, server: LocalServer, length_s: float) -> None:
    soak = _Soak(server=server, ends_s=time.monotonic() + length_s)
    before = await soak.look()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(soak.watch)
        tasks.start_soon(soak.kill_backend, length_s / 2)
        for _ in range(CLIENTS):
            tasks.start_soon(soak.client)
    await anyio.sleep(SETTLE_S)
    after, metrics = await soak.look(), await soak.metrics()
    proof.figure("lives of clients", dict(soak.lives), "reported", True)
    proof.figure("operations done", dict(soak.done), "reported", True)
    proof.at_least("backends killed", int(soak.killed_s < float("inf")), 1)
    proof.equal("trainer's epoch", metrics["lilo_trainer_epoch"], 2.0)
    proof.figure("problems away from the kill", soak.problems[:5], "none", not soak.problems)
    _leaks(proof, soak, before, after)
    _counters(proof, soak, metrics)


def _leaks(proof: Proof, soak: _Soak, before: dict[str, float], after: dict[str, float]) -> None:
    # The trainer that is there at the end began in the middle.
    after_kill = [look for look in soak.looks if look["at_s"] > soak.killed_s + KILL_WINDOW_S]
    for who, looks in (("server", soak.looks), ("sampler", soak.looks), ("trainer", after_kill)):
        rss = [
            statistics.median(look[f"rss of the {who}"] for look in part)
            for part in _second_and_last_quarter(looks)
        ]
        # Of a process that was not found nothing can grow.
        proof.figure(f"RSS of the {who}, second quarter, MiB", rss[0] / 2**20, "> 0", rss[0] > 0)
        limit = RSS_GROWTH * rss[0] + RSS_SLACK_BYTES
        proof.at_most(f"RSS of the {who}, last quarter, MiB", rss[1] / 2**20, limit / 2**20)
    for name in ("files", "tasks", "threads"):
        proof.at_most(f"{name} after it", after[name], before[name] + SLACK)


def _second_and_last_quarter(looks: list[dict[str, float]]) -> tuple[list, list]:
    quarter = len(looks) // 4
    return looks[quarter : 2 * quarter], looks[-quarter:]


def _counters(proof: Proof, soak: _Soak, metrics: dict[str, float]) -> None:
    for command in ("forward_backward", "optim_step", "persist"):
        counted = metrics[f'lilo_operations_total{{command="{command}",outcome="done"}}']
        # A model whose client was killed is put aside once, which is a save that no client sent.
        own = soak.lives["killed"] if command == "persist" else 0
        words = f"{soak.done[command]} fetched <= counted <= {soak.sent[command]} sent + {own} put aside"
        good = soak.done[command] <= counted <= soak.sent[command] + own
        proof.figure(f"{command} counted by the server", counted, words, good)
    answers = {
        name.split('"')[1]: count
        for name, count in metrics.items()
        if name.startswith("lilo_http_responses_total")
    }
    errors = {status: count for status, count in answers.items() if status >= "500"}
    proof.figure("HTTP answers", answers, "reported", True)
    kept = {n.split('"')[1]: v for n, v in metrics.items() if n.startswith("lilo_payload_bytes")}
    proof.figure("data of passes that is kept, bytes", kept, "reported", True)
    # What killed clients left: their sessions end when they were silent for five minutes.
    passes = soak.sent["forward_backward"] * LARGEST_PASS_BYTES
    proof.at_most("of that in no snapshot, share of what was sent", kept["uncovered"] / passes, 0.2)
    # A creation or a call that meets the restart is told to try again: 503, which the SDK does.
    only_unavailable = set(errors) <= {"503"}
    proof.figure("5xx answers", errors, "only 503, only around the kill", only_unavailable)


if __name__ == "__main__":
    main()
