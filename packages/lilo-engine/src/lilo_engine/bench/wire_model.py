"""Models and samplers of the measured server, over a `Wire`: what a client of the SDK has, without its time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from lilo_engine.bench.wire import JSON, Wire
from lilo_engine.requests.proto import tinker_public_pb2 as pb

_ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


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
        made = wire.finished(wire.post("create_model", body)["request_id"], JSON)
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
        saved = self.wire.finished(self.submit("save_weights_for_sampler", body), JSON)
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
