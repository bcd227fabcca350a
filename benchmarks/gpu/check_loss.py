"""Check of the head in one pass: logprobs, slopes of every loss and gradients against float64, no waiting, time and memory.

Bounds are those that a chunked loss with float32 logits from bfloat16 operands was measured at, with some room: logprobs
5e-5 to 8e-5 off at most, hidden gradients 2.2e-3 relative; bfloat16 logits would be off by 0.04.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lilo_miles_backend.bench.clock import GIB, timed
from lilo_miles_backend.ranks.collectives import ALONE
from lilo_miles_backend.ranks.kernels.choose import kernels_of
from lilo_miles_backend.ranks.logprobs import Head, HeadPass
from lilo_miles_backend.ranks.lora import Factors
from lilo_miles_backend.ranks.losses import LOSS_NAMES, SEQUENCE_LOG_RATIO, LossInputs, Objective
from lilo_miles_backend.ranks.token_loss import TokenLoss

from benchmarks.gpu.lines import at_most, bound, emit, part

CASE = "check_loss"
CHECKED = 512
LORA_RANK = 32
ROWS = (200, 300, 12)
"""Tokens of the rows that are checked; chunks of 96 do not end where they do."""


def main() -> None:
    """Every loss, an adapted head, then the shapes of an 8B model and of a 27B one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    gpu = device.type != "cpu"
    vocab, hidden = (151_936, 4096) if gpu else (997, 64)
    weight = torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16) * 0.02
    for name in LOSS_NAMES:
        with part(CASE, name):
            check(name, weight, adapted=name == "cross_entropy")
    del weight
    for vocab, hidden in ((151_936, 4096), (248_320, 5120)) if gpu else ((997, 64),):
        for chunk in (1024, 2048, 4096):
            with part(CASE, f"time, vocabulary {vocab}, chunks of {chunk}"):
                measure(vocab, hidden, chunk, 16_384 if gpu else 512, device)


def check(name: str, weight: torch.Tensor, *, adapted: bool) -> None:
    """One loss over rows, in chunks that cut them, against float64."""
    device, generator = weight.device, torch.Generator(weight.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    vocab, width = weight.shape
    # Logits with a standard deviation of 3, as a trained head's.
    hidden = (random(CHECKED, width) * 3 / (0.02 * width**0.5)).bfloat16()
    factors = _factors(random, vocab, width) if adapted else None
    expected = _Expected(hidden, weight, factors)
    targets = torch.distributions.Categorical(logits=expected.logits.float()).sample()[:, None]
    p = expected.logprobs(targets)
    tensors = {
        "logprobs": p.detach() + 0.1 * random(CHECKED, 1).double(),
        "advantages": random(CHECKED, 1).double(),
        "sequence_ratio_mask": (random(CHECKED, 1) > 0).double(),
    }
    objective = Objective.of(name, {})
    rows = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS)).to(device)
    losses = torch.empty(CHECKED, 1, dtype=torch.float64, device=device)
    loss = TokenLoss(objective, {} if name == "cross_entropy" else tensors, losses)
    kernels = kernels_of(device).logits
    head = HeadPass(
        hidden, targets, Head(weight_VH=weight, factors=factors, chunk_tokens=96, kernels=kernels)
    )
    grad = torch.empty_like(hidden)
    with torch.no_grad():
        if objective.by_sequence:
            loss.set_sequences(head.logprobs(keep=False), rows, len(ROWS), ALONE)
        found = head.backward(loss.slope, grad)

    wanted = _loss(objective, p, tensors, rows)
    wanted.sum().backward()
    wanted = wanted.detach()
    difference = (found.double() - p.detach()).abs()
    at_most(CASE, f"{name}: logprobs, largest error", float(difference.max()), 2e-4)
    value = float((losses.sum() - wanted.sum()).abs() / wanted.abs().sum())
    at_most(CASE, f"{name}: loss, relative to the sum of its sizes", value, 1e-4)
    assert expected.hidden.grad is not None
    at_most(CASE, f"{name}: gradient of hidden states", _relative(grad, expected.hidden.grad), 5e-3)
    for what, ours, theirs in expected.factor_gradients(factors):
        at_most(CASE, f"{name}: gradient of the head's {what}", _relative(ours, theirs), 1e-2)


class _Expected:
    """The same in float64 with autograd and all logits."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, factors: Factors | None) -> None:
        self.hidden = hidden.double().requires_grad_()
        self.logits = self.hidden @ weight.double().t()
        self._factors: tuple[torch.Tensor, ...] = ()
        if factors is not None:
            a, b = (one.double().requires_grad_() for one in (factors.a, factors.b))
            self._factors = (a, b)
            self.logits = self.logits + factors.scale * ((self.hidden @ a.t()) @ b.t())

    def logprobs(self, targets: torch.Tensor) -> torch.Tensor:
        return self.logits.log_softmax(-1).gather(1, targets)

    def factor_gradients(
        self, factors: Factors | None
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        if factors is None:
            return
        for what, ours, theirs in zip(
            ("A", "B"), (factors.grad_a, factors.grad_b), self._factors, strict=True
        ):
            assert theirs.grad is not None
            yield what, ours, theirs.grad


def _factors(random: Callable[..., torch.Tensor], vocab: int, width: int) -> Factors:
    a, b = random(LORA_RANK, width) / width**0.5, random(vocab, LORA_RANK) * 0.05
    return Factors(
        scale=1.0,
        lora_rank=LORA_RANK,
        a=a.bfloat16(),
        b=b.bfloat16(),
        grad_a=torch.zeros_like(a),
        grad_b=torch.zeros_like(b),
    )


def _loss(
    objective: Objective, p: torch.Tensor, tensors: dict[str, torch.Tensor], rows: torch.Tensor
) -> torch.Tensor:
    if objective.name == "cross_entropy":
        tensors = {}
    if objective.by_sequence:
        ratios: list[torch.Tensor] = []
        for row in range(len(ROWS)):
            here = rows == row
            mask = tensors["sequence_ratio_mask"][here]
            distance = (p.detach() - tensors["logprobs"])[here] * mask
            ratios.append((distance.sum() / mask.sum().clamp(min=1)).expand(int(here.sum())))
        tensors = {**tensors, SEQUENCE_LOG_RATIO: torch.cat(ratios)[:, None]}
    return objective.formula(p, LossInputs(tensors=tensors, config=objective.config))


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


def measure(vocab: int, hidden: int, chunk: int, tokens: int, device: torch.device) -> None:
    """Forward and backward of cross entropy at full size; that nothing in it waits; against a matrix product's floor."""
    states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16) * 0.02
    targets = torch.randint(0, vocab, (tokens, 1), device=device)
    losses = torch.empty(tokens, 1, dtype=torch.float64, device=device)
    loss = TokenLoss(Objective.of("cross_entropy", {}), {}, losses)
    head = Head(
        weight_VH=weight, factors=None, chunk_tokens=chunk, kernels=kernels_of(device).logits
    )
    grad = torch.empty_like(states)

    def step() -> None:
        HeadPass(states, targets, head).backward(loss.slope, grad)

    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with torch.no_grad():
        timing = timed(step, warm=2, runs=3)
        with _no_waiting(device):
            step()
    flops = 4.0 * tokens * vocab * hidden
    emit(
        CASE,
        setting=f"one pass, vocabulary {vocab}, hidden {hidden}, chunks of {chunk}",
        tokens=tokens,
        ms=timing.best_s * 1e3,
        tflops=flops / timing.best_s / 1e12,
        extra_gib=timing.peak_gib - held / GIB,
    )
    if device.type == "cuda":
        speed = flops / timing.best_s / 1e12
        good = speed >= 550
        bound(CASE, f"TFLOP/s, vocabulary {vocab}, chunks of {chunk}", speed, ">= 550", good)


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main()
