"""Reinforcement learning of arithmetic, from the first line to the last, through the `tinker` SDK alone.

A model is shown sums such as `37-52=` and answers them several times each. Right answers earn 1, others 0; an answer
is made likelier by as much as it did better than its siblings (group-relative policy optimization, GRPO: Shao et al.,
arXiv:2402.03300, without its division by the standard deviation). No example of a right answer is ever given.

    python rl_arithmetic.py --base-url http://127.0.0.1:8010 --api-key tml-... --base-model tiny

This file is an example to copy: it needs nothing of Lilo, only a server that speaks the Tinker API. `lilo demo` runs
these same functions. The model called `tiny` has partly memorised two-digit sums from its pretraining, most of which
were written down wrong: the loop brings out what the model half knows, it does not teach arithmetic from nothing.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import tinker
from tinker import types

LORA_RANK = 16
LEARNING_RATE = 1.5e-3
QUESTIONS_PER_STEP = 64
ANSWERS_PER_QUESTION = 8
"""Many questions with few answers each: the same 512 answers as 16 x 32, and steadier over seeds."""
MAX_ANSWER_TOKENS = 5
"""The longest answer, `-98` or `198`, and the token that ends it, with one to spare."""


class Tokenizer(Protocol):
    """The two things this loop asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str | list[str]:
        """The text of token ids."""
        ...


# ------------------------------------------------------------------------------------------------ the task


@dataclass(frozen=True, slots=True)
class Question:
    """One sum of two numbers below 100."""

    left: int
    operator: str
    right: int

    @property
    def prompt(self) -> str:
        """What the model reads."""
        return f"{self.left}{self.operator}{self.right}="

    @property
    def answer(self) -> str:
        """What it should write."""
        return str(self.left + self.right if self.operator == "+" else self.left - self.right)


def draw_questions(
    rng: random.Random, count: int, exclude: Collection[Question] = ()
) -> list[Question]:
    """`count` different questions, none of them in `exclude`."""
    drawn: dict[Question, None] = {}
    while len(drawn) < count:
        question = Question(rng.randrange(100), rng.choice("+-"), rng.randrange(100))
        if question not in exclude:
            drawn[question] = None
    return list(drawn)


EXAM = tuple(draw_questions(random.Random(2026), 256))
"""The questions that accuracy is measured on. They are fixed, and training never asks them."""


def reward(tokenizer: Tokenizer, question: Question, sequence: types.SampledSequence) -> float:
    """1 for the right answer, ended by the model itself; 0 for anything else."""
    text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    return float(sequence.stop_reason == "stop" and text == question.answer)


# ------------------------------------------------------------------------------------------------ sampling


def ask(
    sampler: tinker.SamplingClient,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    answers_each: int,
    seed: int,
) -> list[Sequence[types.SampledSequence]]:
    """`answers_each` answers to every question at temperature 1; all requests are sent before any is waited for."""
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(tokenizer.encode(question.prompt)),
            num_samples=answers_each,
            sampling_params=types.SamplingParams(
                max_tokens=MAX_ANSWER_TOKENS, temperature=1.0, seed=seed + index
            ),
        )
        for index, question in enumerate(questions)
    ]
    return [future.result().sequences for future in futures]


def examine(sampler: tinker.SamplingClient, tokenizer: Tokenizer, seed: int = 0) -> float:
    """Share of the exam's questions answered right, one try each."""
    groups = ask(sampler, tokenizer, EXAM, answers_each=1, seed=1_000_000 + seed)
    return sum(
        reward(tokenizer, question, group[0]) for question, group in zip(EXAM, groups, strict=True)
    ) / len(EXAM)


# ------------------------------------------------------------------------------------------------ training


def make_datum(
    prompt_ids: Sequence[int], sequence: types.SampledSequence, advantage: float
) -> types.Datum:
    """One answer as the importance-sampling loss wants it.

    Position i of the input predicts target i, so everything is shifted by one. Positions inside the prompt have
    advantage 0 and so no part in the loss. `logprobs` are those the sampler reported for its own tokens.
    """
    ids = [*prompt_ids, *sequence.tokens]
    before = len(prompt_ids) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=ids[1:], dtype="int64"),
            "logprobs": types.TensorData(
                data=[0.0] * before + list(sequence.logprobs or ()), dtype="float32"
            ),
            "advantages": types.TensorData(
                data=[0.0] * before + [advantage] * len(sequence.tokens), dtype="float32"
            ),
        },
    )


def make_batch(
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    groups: Sequence[Sequence[types.SampledSequence]],
) -> tuple[list[types.Datum], float]:
    """The answers worth learning from, and the mean reward of all.

    An answer's advantage is its reward minus its group's mean: a group that is all right or all wrong says nothing
    and is left out. The loss is a sum over tokens; dividing by the number of sampled tokens makes it a mean.
    """
    rewards = [
        [reward(tokenizer, question, sequence) for sequence in group]
        for question, group in zip(questions, groups, strict=True)
    ]
    num_tokens = sum(len(sequence.tokens) for group in groups for sequence in group)
    data: list[types.Datum] = []
    for question, group, group_rewards in zip(questions, groups, rewards, strict=True):
        mean = sum(group_rewards) / len(group_rewards)
        if mean in (0.0, 1.0):
            continue
        prompt_ids = tokenizer.encode(question.prompt)
        data += [
            make_datum(prompt_ids, sequence, (value - mean) / num_tokens)
            for sequence, value in zip(group, group_rewards, strict=True)
        ]
    all_rewards = [value for group_rewards in rewards for value in group_rewards]
    return data, sum(all_rewards) / len(all_rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did."""

    reward: float
    """Mean over all answers sampled in this step."""
    num_tokens: int
    """Prompt and answer tokens, sampled and then trained on."""
    seconds: float


def train(
    client: tinker.TrainingClient, tokenizer: Tokenizer, rng: random.Random, steps: int
) -> Iterator[StepReport]:
    """Run `steps` steps, one each time the caller asks for the next report."""
    adam = types.AdamParams(
        learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0
    )
    sampler = client.save_weights_and_get_sampling_client().result()
    for _ in range(steps):
        started = time.perf_counter()
        questions = draw_questions(rng, QUESTIONS_PER_STEP, exclude=EXAM)
        groups = ask(sampler, tokenizer, questions, ANSWERS_PER_QUESTION, seed=rng.randrange(2**30))
        data, mean_reward = make_batch(tokenizer, questions, groups)
        if data:
            # Both calls are sent at once and run in this order; then the new weights become a new sampler.
            gradients = client.forward_backward(data, "importance_sampling")
            update = client.optim_step(adam)
            gradients.result()
            update.result()
            sampler = client.save_weights_and_get_sampling_client().result()
        num_tokens = sum(datum.model_input.length + 1 for datum in data)
        yield StepReport(
            reward=mean_reward, num_tokens=num_tokens, seconds=time.perf_counter() - started
        )


# ------------------------------------------------------------------------------------------------ as a script


def main() -> None:
    """Parse the command line, train, examine before and after, save."""
    parser = argparse.ArgumentParser(description="Reinforcement learning of arithmetic.")
    parser.add_argument("--base-url", default=None, help="default: $TINKER_BASE_URL")
    parser.add_argument("--api-key", default=None, help="default: $TINKER_API_KEY")
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    with tinker.ServiceClient(base_url=arguments.base_url, api_key=arguments.api_key) as service:
        client = service.create_lora_training_client(
            base_model=arguments.base_model, rank=LORA_RANK, seed=arguments.seed
        ).result()
        tokenizer = client.get_tokenizer()
        before = examine(client.save_weights_and_get_sampling_client().result(), tokenizer)
        print(f"before: {before:.3f} of {len(EXAM)} questions right")
        reports = train(client, tokenizer, random.Random(arguments.seed), arguments.steps)
        for step, report in enumerate(reports, start=1):
            print(f"step {step:3d}  reward {report.reward:.3f}  {report.seconds:.2f} s")
        after = examine(client.save_weights_and_get_sampling_client().result(), tokenizer)
        print(f"after: {after:.3f}")
        print(f"saved: {client.save_state('arithmetic').result().path}")


if __name__ == "__main__":
    main()
