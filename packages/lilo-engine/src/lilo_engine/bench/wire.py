"""Wire: HTTP over one socket with next to no time of its own, so that what is measured is the server's. Blocking.

The SDK and httpx take one to three milliseconds of a processor for a request, more than the server does. This takes
about 0.1 ms. Only what the measured server sends is understood: a status, a Content-Length, a body.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from lilo_engine.bench.serve import KEY
from lilo_engine.requests.proto import tinker_public_pb2 as pb

LIMIT_S = 120.0
"""For an answer."""
_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"
_OK = 200
_PENDING = 408
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
_ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


class Wire:
    """One connection; requests go one after another."""

    def __init__(self, url: str, key: str = KEY) -> None:
        """Connect."""
        parts = urlsplit(url)
        self._head = f"Host: {parts.netloc}\r\nX-API-Key: {key}\r\n"
        self._stream = socket.create_connection((parts.hostname or "", parts.port or 80), LIMIT_S)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def send(
        self, path: str, body: bytes, media: str = _JSON, accept: str = "*/*", verb: str = "POST"
    ) -> None:
        """Send a request; `receive` gets its answer."""
        head = (
            f"{verb} {path} HTTP/1.1\r\n{self._head}Content-Type: {media}\r\nAccept: {accept}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._stream.sendall(head.encode("ascii") + body)

    def receive(self) -> tuple[int, bytes]:
        """Status and body of the next answer.

        Raises:
            ConnectionError: the server closed the connection.
        """
        data = self._rest
        while (end := data.find(_HEAD_END)) < 0:
            data += self._more()
        head = data[:end].lower()
        at = head.find(_LENGTH)
        length = int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        end += len(_HEAD_END)
        while len(data) < end + length:
            data += self._more()
        self._rest = data[end + length :]
        return int(head[9:12]), data[end : end + length]

    def post(self, call: str, body: Mapping[str, object]) -> dict[str, Any]:
        """A call of the API with JSON both ways.

        Raises:
            RuntimeError: the answer is an error.
        """
        self.send(f"/api/v1/{call}", json.dumps(body).encode())
        return json.loads(self._good(call))

    def post_protobuf(self, call: str, body: bytes) -> dict[str, Any]:
        """The same with a protobuf body."""
        self.send(f"/api/v1/{call}", body, _PROTOBUF)
        return json.loads(self._good(call))

    def get(self, path: str) -> bytes:
        """A page."""
        self.send(path, b"", verb="GET")
        return self._good(path)

    def until_ready(self) -> None:
        """Return when models can be created."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            self.send("/api/v1/healthz", b"", verb="GET")
            if self.receive()[0] == _OK:
                return
            assert time.monotonic() < deadline, f"the server was not ready within {LIMIT_S:g} s"
            time.sleep(0.02)

    def finished(self, request_id: str, accept: str = _PROTOBUF) -> bytes:
        """The answer of a future, polled as the SDK polls."""
        body = json.dumps({"request_id": request_id}).encode()
        while True:
            self.send("/api/v1/retrieve_future", body, accept=accept)
            status, data = self.receive()
            if status != _PENDING:
                return _checked("retrieve_future", status, data)

    def _good(self, call: str) -> bytes:
        return _checked(call, *self.receive())

    def _more(self) -> bytes:
        data = self._stream.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data


@dataclass(slots=True, kw_only=True)
class WireModel:
    """One model of one session."""

    wire: Wire
    session_id: str
    model_id: str
    _seq: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def create(cls, wire: Wire) -> Self:
        """A session with one model."""
        session_id = wire.post("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
        body = {
            "session_id": session_id,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
        }
        made = wire.finished(wire.post("create_model", body)["request_id"], _JSON)
        return cls(wire=wire, session_id=session_id, model_id=json.loads(made)["model_id"])

    def skip_number(self) -> None:
        """Leave a gap: everything after it is parked."""
        next(self._seq)

    def forward_backward(self, data: bytes, loss: str = "importance_sampling") -> str:
        """Send a pass whose datums are already encoded (`client.datums`); its request id."""
        head = pb.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=next(self._seq), loss_fn=loss
        )
        # Messages may be put together by putting their bytes together.
        body = head.SerializeToString() + data
        return self.wire.post_protobuf("forward_backward", body)["request_id"]

    def submit(self, call: str, fields: Mapping[str, object]) -> str:
        """Send a numbered call with these fields; its request id."""
        body = {"model_id": self.model_id, "seq_id": next(self._seq), **fields}
        return self.wire.post(call, body)["request_id"]

    def step(self, data: bytes) -> None:
        """A pass and a step, each awaited."""
        self.wire.finished(self.forward_backward(data))
        self.wire.finished(self.submit("optim_step", {"adam_params": _ADAM}))

    def pipelined(self, data: bytes) -> None:
        """A pass and a step, both sent before either is awaited."""
        ids = [
            self.forward_backward(data),
            self.submit("optim_step", {"adam_params": _ADAM}),
        ]
        for request_id in ids:
            self.wire.finished(request_id)

    def heartbeat(self) -> None:
        """Say that the session is alive."""
        self.wire.post("session_heartbeat", {"session_id": self.session_id})

    def sampler(self) -> WireSampler:
        """A sampling client on the weights as they are now."""
        body = {"sampling_session_seq_id": 0}
        saved = self.wire.finished(self.submit("save_weights_for_sampler", body), _JSON)
        return WireSampler(session_id=json.loads(saved)["sampling_session_id"])


@dataclass(slots=True, kw_only=True)
class WireSampler:
    """One sampling client; several connections may use it."""

    session_id: str
    _seq: itertools.count[int] = field(default_factory=itertools.count)

    def sample(self, wire: Wire, *, samples: int, tokens: int, seed: int) -> None:
        """Samples of exactly so many tokens from a short prompt."""
        body: dict[str, object] = {
            "sampling_session_id": self.session_id,
            "seq_id": next(self._seq),
            "num_samples": samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(40, 56))}]},
            # Nothing stops them early, so that every way of asking costs the sampler the same tokens.
            "sampling_params": {"max_tokens": tokens, "seed": seed, "stop": []},
        }
        wire.finished(wire.post("asample", body)["request_id"])


@contextmanager
def held_polls(url: str, request_ids: Sequence[str], count: int) -> Generator[None]:
    """So many polls that wait for these futures while the context lasts; nobody reads their answers.

    They are with the server when the context begins: its own count of tasks says so.
    """
    with Wire(url) as looking:
        wires = [Wire(url) for _ in range(count)]
        try:
            before = _num_tasks(looking)
            for index, wire in enumerate(wires):
                body = json.dumps({"request_id": request_ids[index % len(request_ids)]}).encode()
                wire.send("/api/v1/retrieve_future", body)
            deadline = time.monotonic() + LIMIT_S
            while _num_tasks(looking) < before + count:
                assert time.monotonic() < deadline, f"{count} polls did not arrive in {LIMIT_S} s"
                time.sleep(0.02)
            yield
        finally:
            for wire in wires:
                wire.__exit__()


def _num_tasks(wire: Wire) -> float:
    lines = wire.get("/metrics").decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("lilo_tasks "))


def _checked(call: str, status: int, data: bytes) -> bytes:
    if status != _OK:
        raise RuntimeError(f"{call} answered {status}: {data[:300]!r}")
    return data
