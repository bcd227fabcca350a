"""The course of a demo: train, save, stop the server, start it again, resume with the optimizer, go on, examine.

Nothing here draws or prints: whoever runs it watches through `Watch`. The training itself is `rl_arithmetic`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tinker

from lilo_engine.demo.rl_arithmetic import (
    LORA_RANK,
    Question,
    StepReport,
    Tokenizer,
    ask,
    examine,
    train,
)
from lilo_engine.demo.server import LocalServer

SHOWN = (
    Question(7, "+", 8),
    Question(25, "+", 31),
    Question(64, "-", 19),
    Question(18, "-", 73),
    Question(96, "+", 87),
)
"""The five sums whose sampled answers are shown; all of them may also be asked in training."""
SHARE_BEFORE_RESTART = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """One sum and what the model said to it, one try each time."""

    question: Question
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a demo measured."""

    before: float
    """Share of the 256 exam questions answered right before the first step, at temperature 1."""
    after: float
    """The same after the last step."""
    rewards: tuple[float, ...]
    """Mean training reward of each step."""
    restart_after: int
    """Steps done when the server was stopped and started again."""
    answers: tuple[ShownAnswer, ...]
    checkpoint: str
    """Path (`tinker://`) of the training state saved at the end, with its optimizer."""
    adapter: str
    """Path of the sampler weights saved at the end: a PEFT folder."""
    seconds: float
    """Wall time of everything, starting both servers included."""


class Watch(Protocol):
    """Who is told how it goes."""

    def phase(self, text: str) -> None:
        """Something other than a step has begun."""
        ...

    def step(self, report: StepReport) -> None:
        """A step has ended."""
        ...


def run_demo(server: LocalServer, *, seed: int, steps: int, watch: Watch) -> Outcome:
    """Run the whole demo on a server that is not running yet; it is stopped again at the end, or on any error.

    Raises:
        ServerFailed: the server did not start.
        tinker.TinkerError: it refused or failed something.
    """
    started = time.perf_counter()
    rng = random.Random(seed)
    first = max(1, round(steps * SHARE_BEFORE_RESTART))
    rewards: list[float] = []

    def learn(client: tinker.TrainingClient, tokenizer: Tokenizer, count: int) -> None:
        for report in train(client, tokenizer, rng, count):
            rewards.append(report.reward)
            watch.step(report)

    watch.phase("starting a server")
    with server, _connect(server) as service:
        client = service.create_lora_training_client("tiny", rank=LORA_RANK, seed=seed).result()
        tokenizer: Tokenizer = client.get_tokenizer()
        watch.phase("exam before the first step")
        sampler = client.save_weights_and_get_sampling_client().result()
        before, said_before = examine(sampler, tokenizer, seed), _answers(sampler, tokenizer)
        watch.phase("training")
        learn(client, tokenizer, first)
        watch.phase("saving, and stopping the server")
        halfway = client.save_state("halfway").result().path

    watch.phase("starting the server again")
    with server, _connect(server) as service:
        client = service.create_training_client_from_state_with_optimizer(halfway).result()
        watch.phase("training, resumed with the optimizer")
        learn(client, tokenizer, steps - first)
        watch.phase("exam after the last step")
        sampler = client.save_weights_and_get_sampling_client().result()
        after, said_after = examine(sampler, tokenizer, seed), _answers(sampler, tokenizer)
        watch.phase("saving, and stopping the server")
        checkpoint = client.save_state("final").result().path
        adapter = client.save_weights_for_sampler("final").result().path
    return Outcome(
        before=before,
        after=after,
        rewards=tuple(rewards),
        restart_after=first,
        answers=tuple(
            ShownAnswer(question=question, before=early, after=late)
            for question, early, late in zip(SHOWN, said_before, said_after, strict=True)
        ),
        checkpoint=checkpoint,
        adapter=adapter,
        seconds=time.perf_counter() - started,
    )


def _connect(server: LocalServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)


def _answers(sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> Sequence[str]:
    groups = ask(sampler, tokenizer, SHOWN, answers_each=1, seed=7)
    return [str(tokenizer.decode(group[0].tokens, skip_special_tokens=True)) for group in groups]
