"""Drawing one token per row: temperature, top-k, top-p, and a stream of random numbers per sample.

Each sample owns its stream, and a token takes exactly one number from it, mapped through the cumulative distribution
in vocabulary order. So a seeded sample does not depend on what else is in the batch, beyond float noise in its logits.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one sample's tokens are drawn."""

    temperature: float
    """0 = the most likely token."""
    top_k: int
    """-1 = all."""
    top_p: float
    stream: random.Random


def stream(seed: int | None, sample: int) -> random.Random:
    """Random numbers of sample `sample` of a request: of seed + sample, or from entropy.

    The text form is used because Python seeds with the absolute value of a number.
    """
    return random.Random(str(secrets.randbits(64) if seed is None else seed + sample))


def draw_tokens(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of finite float32 logits.

    Temperature comes first, then top-k, then top-p over what top-k left (the smallest set of most likely tokens whose
    probabilities reach top_p, arXiv:1904.09751).
    """
    if all(draw.temperature == 0 for draw in draws):
        return logits_BV.argmax(dim=-1).tolist()
    rows = torch.tensor([i for i, draw in enumerate(draws) if draw.temperature > 0])
    drawn = [draw for draw in draws if draw.temperature > 0]
    tokens = logits_BV.argmax(dim=-1).tolist()
    chosen = _sample(logits_BV[rows.to(logits_BV.device)], drawn)
    for row, token in zip(rows.tolist(), chosen, strict=True):
        tokens[row] = token
    return tokens


def _sample(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    device = logits_BV.device
    temperature = torch.tensor([draw.temperature for draw in draws], device=device).double()
    # The maximum goes first: a tiny temperature then gives -large and 0, never infinity minus infinity.
    scaled = logits_BV.double()
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / temperature[:, None]
    weights = scaled.exp()
    if any(draw.top_k > 0 or draw.top_p < 1 for draw in draws):
        weights = _truncate(weights, draws)
    cumulative = weights.cumsum(dim=-1)
    uniform = torch.tensor([draw.stream.random() for draw in draws], device=device).double()
    # A number in [0, 1) times the total lies below it, so the first entry above it has a weight over 0.
    target = uniform[:, None] * cumulative[:, -1:]
    return (cumulative > target).int().argmax(dim=-1).tolist()


def _truncate(weights_BV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Zero what top-k and top-p leave out; the most likely token always stays."""
    device, size = weights_BV.device, weights_BV.shape[1]
    top_k = torch.tensor([draw.top_k if draw.top_k > 0 else size for draw in draws], device=device)
    top_p = torch.tensor([draw.top_p for draw in draws], device=device).double()
    ordered, order = weights_BV.sort(dim=-1, descending=True, stable=True)
    ordered = ordered * (torch.arange(size, device=device)[None] < top_k[:, None])
    before = ordered.cumsum(dim=-1) - ordered
    keep = before < top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
    keep[:, 0] = True
    return torch.zeros_like(weights_BV).scatter(-1, order, ordered * keep)
