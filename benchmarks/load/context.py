"""What every section uses: the settings, the service, data, clients, and the step that is timed."""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import tinker
from tinker import types

STARTED = time.time()


def log(*words: object) -> None:
    """A line on stderr with the time since the start."""
    print(f"[{time.time() - STARTED:7.1f}s]", *words, file=sys.stderr, flush=True)


def settle(value: Any) -> Any:
    """Newer SDKs hand back a future for a client, older ones the client."""
    return value.result() if callable(getattr(value, "result", None)) else value


def values(tensor: Any) -> list[float]:
    """The numbers of an SDK tensor."""
    data = getattr(tensor, "data", tensor)
    return data.tolist() if hasattr(data, "tolist") else list(data)


def largest_difference(left: list[list[float]], right: list[list[float]]) -> float:
    """The largest |a - b| over lists of logprobs."""
    return max(
        abs(a - b)
        for row, other in zip(left, right, strict=True)
        for a, b in zip(row, other, strict=True)
    )


@dataclass
class Step:
    """Times of some steps, in seconds; the parts only when each call was awaited."""

    whole: list[float] = field(default_factory=list)
    forward_backward: list[float] = field(default_factory=list)
    optim_step: list[float] = field(default_factory=list)


class Load:
    """One run of the driver against one server."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.rng = random.Random(settings.seed)
        self.service = tinker.ServiceClient(base_url=settings.base_url, api_key=settings.api_key)
        self._main: tinker.TrainingClient | None = None
        self.restored: tinker.TrainingClient | None = None
        """The client that the ckpt section made, used again by later sections: adapter slots are few."""

    # ---- clients

    def client(self, **options: Any) -> tinker.TrainingClient:
        """A new training client with the settings' rank."""
        asked: dict[str, Any] = {"base_model": self.settings.base_model, "rank": self.settings.rank}
        if self.settings.train_unembed is not None:
            asked["train_unembed"] = bool(self.settings.train_unembed)
        return settle(self.service.create_lora_training_client(**asked | options))

    @property
    def main(self) -> tinker.TrainingClient:
        """The client that sections share."""
        if self._main is None:
            self._main = self.client()
        return self._main

    def restore(self, path: str) -> tinker.TrainingClient:
        """A new client from training state, with its optimizer."""
        return settle(self.service.create_training_client_from_state_with_optimizer(path))

    def publish(self, client: tinker.TrainingClient) -> tuple[tinker.SamplingClient, float]:
        """A sampling client of the current weights, and the seconds it took."""
        started = time.perf_counter()
        sampler = settle(client.save_weights_and_get_sampling_client())
        return sampler, time.perf_counter() - started

    # ---- data

    def datum(self, length: int, seed: int | None = None) -> types.Datum:
        """Random tokens; the same for the same seed."""
        rng = self.rng if seed is None else random.Random(seed)
        return self.supervised([rng.randrange(self.settings.vocab) for _ in range(length + 1)])

    def batch(self, offset: int = 0) -> list[types.Datum]:
        """The batch of the settings."""
        settings = self.settings
        return [self.datum(settings.seq, seed=offset + index) for index in range(settings.batch)]

    @staticmethod
    def supervised(tokens: list[int]) -> types.Datum:
        """Predict each token from those before it, weight 1."""
        count = len(tokens) - 1
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[count]),
                "weights": types.TensorData(data=[1.0] * count, dtype="float32", shape=[count]),
            },
        )

    @staticmethod
    def tokens_of(datum: types.Datum) -> list[int]:
        """The tokens that `supervised` was given."""
        tokens = datum.model_input.to_ints()
        return [*tokens, int(values(datum.loss_fn_inputs["target_tokens"])[-1])]

    # ---- calls

    def adam(self, learning_rate: float | None = None) -> types.AdamParams:
        """AdamW parameters."""
        rate = self.settings.lr if learning_rate is None else learning_rate
        return types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)

    def wait(self, future: Any) -> Any:
        """The result, within the settings' limit."""
        return future.result(timeout=self.settings.timeout)

    def train(self, client: tinker.TrainingClient, data: list[types.Datum], rate: float) -> None:
        """One awaited step of cross entropy."""
        self.wait(client.forward_backward(data, "cross_entropy"))
        self.wait(client.optim_step(self.adam(rate)))

    def logprobs(self, client: tinker.TrainingClient, data: list[types.Datum]) -> list[list[float]]:
        """Per datum and token, from a forward pass."""
        output = self.wait(client.forward(data, "cross_entropy"))
        return [values(record["logprobs"]) for record in output.loss_fn_outputs]

    def mean_loss(self, client: tinker.TrainingClient, data: list[types.Datum]) -> float:
        """Negative log-likelihood of a token."""
        rows = self.logprobs(client, data)
        return -sum(map(sum, rows)) / sum(map(len, rows))

    def steps(
        self,
        client: tinker.TrainingClient,
        data: list[types.Datum],
        count: int,
        *,
        pipelined: bool = True,
    ) -> Step:
        """Time `count` steps; pipelined sends both calls of a step before waiting for either."""
        step = Step()
        for _ in range(count):
            started = time.perf_counter()
            gradients = client.forward_backward(data, "cross_entropy")
            if pipelined:
                update = client.optim_step(self.adam())
                self.wait(gradients)
                self.wait(update)
            else:
                self.wait(gradients)
                middle = time.perf_counter()
                step.forward_backward.append(middle - started)
                self.wait(client.optim_step(self.adam()))
                step.optim_step.append(time.perf_counter() - middle)
            step.whole.append(time.perf_counter() - started)
        return step
