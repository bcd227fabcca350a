"""Trains the tiny model: a byte-level Qwen3 of 0.82 million parameters that knows sums but does not always say them.

    python scripts/make_tiny_model.py OUT_FOLDER

Two phases on lines like `12+34=46<end>` (two-digit numbers, plus and minus): first true ones until nearly every sum is
right, then a short while with a wrong answer in 60 % of the lines. The model then samples the right answer about one
time in eight at temperature 1, while the most likely answer is mostly right: a base on which reinforcement learning shows
a rise within minutes. There are only 20,000 different lines, so part of what it knows is learnt by heart.

Everything is drawn from fixed seeds and counted in steps: the same torch build on the same kind of CPU writes the same
bytes (exact match at the end: 0.145 sampled, 0.840 greedy). The weights that ship were made by this recipe with phases
bounded by CPU time (300 s and 30 s) instead of steps, so a new run gives a model like it, not the same one. One thread,
about six minutes.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

BEGIN, END, PAD = 256, 257, 258
BATCH_LINES = 128
LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
MAX_ANSWER_BYTES = 5
"""The longest answer is three digits or a sign and two, and the end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One stretch of training."""

    name: str
    steps: int
    wrong: float
    """Share of lines whose answer is off by 1 to 20."""


PHASES = (
    Phase(name="true lines", steps=2363, wrong=0.0),
    Phase(name="60 % wrong lines", steps=236, wrong=0.6),
)


def config() -> Qwen3Config:
    """128 wide, 4 layers, 4 query and 2 key-value heads of 32, tied embeddings, 260 ids."""
    return Qwen3Config(
        vocab_size=260,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
    )


def draw_line(draw: random.Random, wrong: float) -> tuple[bytes, bytes]:
    """A question such as `12+34=` and its answer, wrong with the given probability."""
    a, b, sign = draw.randrange(100), draw.randrange(100), draw.choice("+-")
    answer = a + b if sign == "+" else a - b
    if wrong and draw.random() < wrong:
        answer += draw.choice((-1, 1)) * draw.randrange(1, 21)
    return f"{a}{sign}{b}=".encode(), str(answer).encode()


def draw_batch(draw: random.Random, wrong: float) -> torch.Tensor:
    """Lines as ids, padded on the right: (BATCH_LINES, longest), int64."""
    lines = (draw_line(draw, wrong) for _ in range(BATCH_LINES))
    rows = [[*question, *answer, END] for question, answer in lines]
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def train(
    model: Qwen3ForCausalLM, phase: Phase, draw: random.Random, report: Callable[[str], None]
) -> None:
    """Run one phase: AdamW with warm-up, then a linear fall to 5 % of the learning rate."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in range(phase.steps):
        scale = min(1.0, (step + 1) / WARMUP_STEPS) * max(0.05, 1 - step / phase.steps)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * scale
        ids = draw_batch(draw, phase.wrong)
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), ignore_index=PAD
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            report(f"{phase.name}: step {step + 1} of {phase.steps}, loss {loss.item():.3f}")


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, *, greedy: bool, num_questions: int = 256) -> float:
    """Share of fixed questions that are answered exactly, greedy or sampled at temperature 1."""
    draw = random.Random(1)
    lines = [draw_line(draw, 0.0) for _ in range(num_questions)]
    right = 0
    for length in sorted({len(question) for question, _ in lines}):
        group = [line for line in lines if len(line[0]) == length]
        ids = torch.tensor([list(question) for question, _ in group])
        for _ in range(MAX_ANSWER_BYTES):
            logits = model(ids).logits[:, -1]
            chances = logits.softmax(-1)
            chosen = logits.argmax(-1) if greedy else torch.multinomial(chances, 1)[:, 0]
            ids = torch.cat([ids, chosen[:, None]], 1)
        for row, (_, answer) in zip(ids[:, length:].tolist(), group, strict=True):
            right += row[: len(answer) + 1] == [*answer, END]
    return right / num_questions


def main() -> None:
    """Train both phases, print the accuracies, write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where config.json and model.safetensors go")
    parser.add_argument("--share", type=float, default=1.0, help="share of the steps, to try it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, draw = Qwen3ForCausalLM(config()).float(), random.Random(0)
    for phase in PHASES:
        steps = max(1, round(phase.steps * options.share))
        train(model, Phase(name=phase.name, steps=steps, wrong=phase.wrong), draw, print)
        sampled, greedy = accuracy(model, greedy=False), accuracy(model, greedy=True)
        print(f"after {phase.name}: exact match {sampled:.3f} sampled, {greedy:.3f} greedy")
    model.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
