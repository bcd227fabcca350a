"""Client: speaks to the measured server as the SDK does, in the SDK's own bytes, without the SDK's own time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import numpy as np

from lilo_engine.bench.serve import KEY
from lilo_engine.requests.proto import tinker_public_pb2 as pb

LIMIT_S = 120.0
"""For anything to finish."""
_PROTOBUF = {"Content-Type": "application/x-protobuf", "Accept": "application/x-protobuf"}
_ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def http_client(url: str, connections: int = 64, key: str = KEY) -> httpx.AsyncClient:
    """A client with a key and room for so many connections."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(
        base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, limits=limits, timeout=LIMIT_S
    )


async def until_ready(http: httpx.AsyncClient) -> None:
    """Return when models can be created."""
    with anyio.fail_after(LIMIT_S):
        while True:
            if (await http.get("healthz")).status_code == httpx.codes.OK.value:
                return
            await anyio.sleep(0.02)


@dataclass(slots=True, kw_only=True)
class BenchModel:
    """One model of one session."""

    http: httpx.AsyncClient
    session_id: str
    model_id: str
    _seq: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def skip_number(self) -> None:
        """Leave a gap: everything after it is parked."""
        next(self._seq)

    async def forward_backward(self, data: bytes) -> str:
        """Send a pass whose datums are already encoded (`datums`); its request id."""
        head = pb.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=next(self._seq), loss_fn="importance_sampling"
        )
        # Messages may be put together by putting their bytes together.
        body = head.SerializeToString() + data
        answer = await self.http.post("forward_backward", content=body, headers=_PROTOBUF)
        return _checked(answer)["request_id"]

    async def optim_step(self) -> str:
        """Send a step; its request id."""
        return await self.submit_json("optim_step", {"adam_params": _ADAM})

    async def submit_json(self, call: str, fields: Mapping[str, object]) -> str:
        """Send a numbered call with these fields; its request id."""
        body = {"model_id": self.model_id, "seq_id": next(self._seq), **fields}
        return _checked(await self.http.post(call, json=body))["request_id"]

    async def finished(self, request_id: str) -> bytes:
        """The answer of a future, polled as the SDK polls."""
        with anyio.fail_after(LIMIT_S):
            while True:
                answer = await self.http.post(
                    "retrieve_future",
                    json={"request_id": request_id},
                    headers={"Accept": "application/x-protobuf"},
                )
                if answer.status_code != httpx.codes.REQUEST_TIMEOUT.value:
                    answer.raise_for_status()
                    return answer.content

    async def step(self, data: bytes) -> None:
        """A pass and a step, each awaited."""
        await self.finished(await self.forward_backward(data))
        await self.finished(await self.optim_step())

    async def heartbeat(self) -> None:
        """Say that the session is alive."""
        _checked(await self.http.post("session_heartbeat", json={"session_id": self.session_id}))


async def create_model(http: httpx.AsyncClient) -> BenchModel:
    """A session with one model."""
    session = _checked(await http.post("create_session", json={"tags": [], "sdk_version": "0"}))
    body = {
        "session_id": session["session_id"],
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 4},
    }
    request_id = _checked(await http.post("create_model", json=body))["request_id"]
    found = BenchModel(http=http, session_id=session["session_id"], model_id="")
    with anyio.fail_after(LIMIT_S):
        while not found.model_id:
            answer = await http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != httpx.codes.REQUEST_TIMEOUT.value:
                found.model_id = _checked(answer)["model_id"]
    return found


def datums(count: int, tokens: int) -> bytes:
    """Encoded datums of an importance-sampling pass: ids, targets, logprobs and advantages."""
    ids = np.arange(tokens, dtype="<i4") % 250
    message = pb.ForwardBackwardRequest()
    for _ in range(count):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = ids.tobytes()
        columns = {
            "target_tokens": (pb.DTYPE_INT64, ids.astype("<i8")),
            "logprobs": (pb.DTYPE_FLOAT32, np.zeros(tokens, dtype="<f4")),
            "advantages": (pb.DTYPE_FLOAT32, np.ones(tokens, dtype="<f4")),
        }
        for name, (dtype, values) in columns.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = dtype
            tensor.shape.append(tokens)
            tensor.dense = values.tobytes()
    return message.SerializeToString()


async def timed(call: Callable[[], Awaitable[object]], count: int) -> dict[str, float]:
    """Milliseconds of a call made so many times, one after another."""
    took: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        await call()
        took.append(1e3 * (time.perf_counter() - started))
    return percentiles(took)


def timed_now(call: Callable[[], object], count: int) -> dict[str, float]:
    """The same of a call that blocks."""
    return percentiles(times_ms(call, count))


def times_ms(call: Callable[[], object], count: int) -> list[float]:
    """How long a call that blocks took each time, in milliseconds."""
    took: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - started))
    return took


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """The middle of times in milliseconds, and what one in a hundred exceeds."""
    return {"p50_ms": float(np.median(times)), "p99_ms": float(np.percentile(times, 99))}


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise RuntimeError(
            f"{answer.request.url} answered {answer.status_code}: {answer.text[:300]}"
        )
    return answer.json()
