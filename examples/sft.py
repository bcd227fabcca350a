"""Supervised fine-tuning on your own text, through the `tinker` SDK alone.

    python sft.py --file chats.jsonl --base-url http://127.0.0.1:8010 --api-key tml-...

The file is either JSON lines of chats, `{"messages": [{"role": "user", "content": "..."}, ...]}`, of which the
assistant's turns are learned, or plain text, all of which is learned. Lets the model write something, prints the loss of
every batch and the seconds that a step takes, saves training state and sampler weights, and lets it write again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
from tinker import types


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and which of them are learned (the first never is: nothing comes before it)."""

    ids: list[int]
    learned: list[bool]


# ------------------------------------------------------------------------------------------------ the data


def render(tokenizer: Any, messages: Sequence[dict[str, str]], *, ask: bool = False) -> list[int]:  # noqa: ANN401
    """Token ids of a chat, by the model's own template; `ask` adds the header of an assistant's turn."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
    return tokenizer.encode(text, add_special_tokens=False)


def chat_example(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Example:  # noqa: ANN401
    """A chat of which the assistant's turns are learned.

    A turn's tokens are what its message adds to everything before it, header of the turn included in "before".

    Raises:
        ValueError: the template does not only append, so that turns cannot be told apart.
    """
    ids = render(tokenizer, messages)
    learned = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], ask=True)
        upto = render(tokenizer, messages[: index + 1])
        if ids[: len(upto)] != upto or upto[: len(before)] != before:
            raise ValueError("the chat template rewrites earlier turns; split such chats yourself")
        learned[len(before) : len(upto)] = [True] * (len(upto) - len(before))
    return Example(ids, learned)


def read_chats(path: Path, tokenizer: Any, max_tokens: int) -> list[Example]:  # noqa: ANN401
    """One example per line of a JSONL file; what is longer than `max_tokens` is cut at the end."""
    examples: list[Example] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            example = chat_example(tokenizer, messages)
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            sys.exit(
                f'{path}:{number}: expected {{"messages": [{{"role": ..., "content": ...}}]}}: {error!r}'
            )
        example = Example(example.ids[:max_tokens], example.learned[:max_tokens])
        if any(example.learned[1:]):
            examples.append(example)
    return examples


def read_text(path: Path, tokenizer: Any, max_tokens: int) -> list[Example]:  # noqa: ANN401
    """Plain text, cut into pieces of `max_tokens`."""
    ids = tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False)
    pieces = [ids[start : start + max_tokens] for start in range(0, len(ids), max_tokens)]
    return [Example(piece, [True] * len(piece)) for piece in pieces if len(piece) > 1]


def make_datum(example: Example, weight: float) -> types.Datum:
    """Position i of the input predicts target i; `weight` for learned targets, 0 for the rest."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(example.ids[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=example.ids[1:], dtype="int64"),
            "weights": types.TensorData(
                data=[weight if learned else 0.0 for learned in example.learned[1:]],
                dtype="float32",
            ),
        },
    )


def batches(examples: list[Example], size: int, epochs: int, seed: int) -> Iterator[list[Example]]:
    """Every example once per epoch, in a new order each time."""
    rng = random.Random(seed)
    for _ in range(epochs):
        order = rng.sample(examples, len(examples))
        yield from (order[start : start + size] for start in range(0, len(order), size))


# ------------------------------------------------------------------------------------------------ training


def train(client: tinker.TrainingClient, plan: list[list[Example]], learning_rate: float) -> None:
    """One optimizer step per batch, with a learning rate that falls to zero in a straight line.

    The next batch is sent before the last one's loss is waited for, so the server never waits for us.
    """
    waiting: list[tuple[int, tinker.APIFuture[types.ForwardBackwardOutput]]] = []

    def report() -> None:
        step, future = waiting.pop(0)
        # The weights of a batch add up to 1, so the sum is the mean loss of a learned token.
        print(f"batch {step:4d} of {len(plan)}  loss {future.result().metrics['loss:sum']:.4f}")

    for step, batch in enumerate(plan, start=1):
        weight = 1.0 / sum(sum(example.learned[1:]) for example in batch)
        data = [make_datum(example, weight) for example in batch]
        rate = learning_rate * (1 - (step - 1) / len(plan))
        future = client.forward_backward(data, "cross_entropy")
        client.optim_step(
            types.AdamParams(
                learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0
            )
        )
        waiting.append((step, future))
        if len(waiting) > 1:
            report()
    while waiting:
        report()


def write_something(client: tinker.TrainingClient, prompt: list[int], max_tokens: int) -> str:
    """One continuation of `prompt` by the model as it is now."""
    sampler = client.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(
        prompt=types.ModelInput.from_ints(prompt),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=0),
    ).result()
    return str(client.get_tokenizer().decode(answer.sequences[0].tokens))


def offered_model(base_url: str | None, api_key: str | None) -> str:
    """The first model that the server offers."""
    server = tinker.RestClient(base_url=base_url, api_key=api_key)
    return server.get_server_capabilities().result().supported_models[0].model_name or "tiny"


def prompts(texts: list[str] | None, tokenizer: Any, first: Example) -> list[list[int]]:  # noqa: ANN401
    """What the model is to continue: these texts, or the beginning of the first example."""
    if texts:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    prompt = first.ids[: max(1, first.learned.index(True))]
    return [prompt if len(prompt) > 1 else first.ids[:16]]


def main() -> None:
    """Parse the command line, read the file, sample, train, save, sample again."""
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on your own text.")
    parser.add_argument("--file", type=Path, required=True, help="chats (.jsonl) or plain text")
    parser.add_argument("--base-url", default=None, help="default: $TINKER_BASE_URL")
    parser.add_argument("--api-key", default=None, help="default: $TINKER_API_KEY")
    parser.add_argument("--base-model", default=None, help="default: what the server offers")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=512, help="of one example")
    parser.add_argument("--prompt", action="append", help="to be continued; again for more")
    parser.add_argument("--sample-tokens", type=int, default=64)
    parser.add_argument("--name", default="sft", help="of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not arguments.file.is_file():
        sys.exit(f"{arguments.file}: no such file")

    with tinker.ServiceClient(base_url=arguments.base_url, api_key=arguments.api_key) as service:
        client = service.create_lora_training_client(
            arguments.base_model or offered_model(arguments.base_url, arguments.api_key),
            rank=arguments.lora_rank,
            seed=arguments.seed,
        ).result()
        tokenizer = client.get_tokenizer()
        read = read_chats if arguments.file.suffix == ".jsonl" else read_text
        examples = read(arguments.file, tokenizer, arguments.max_tokens)
        if not examples:
            sys.exit(f"{arguments.file}: nothing to learn from")
        asked = prompts(arguments.prompt, tokenizer, examples[0])
        before = [write_something(client, prompt, arguments.sample_tokens) for prompt in asked]
        plan = list(batches(examples, arguments.batch_size, arguments.epochs, arguments.seed))
        started = time.monotonic()
        train(client, plan, arguments.learning_rate)
        seconds = time.monotonic() - started
        print(f"{len(plan)} steps in {seconds:.1f} s, {seconds / len(plan):.2f} s a step")
        print(f"training state: {client.save_state(arguments.name).result().path}")
        print(f"sampler weights: {client.save_weights_for_sampler(arguments.name).result().path}")
        for prompt, earlier in zip(asked, before, strict=True):
            print(f"--- prompt\n{tokenizer.decode(prompt)}\n--- before\n{earlier}")
            print(f"--- after\n{write_something(client, prompt, arguments.sample_tokens)}")


if __name__ == "__main__":
    main()
