"""Log-probabilities under the untempered model distribution: of chosen tokens, and of the k most likely ones.

Sampling parameters never change them, so that they equal what the trainer computes for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from lilo_engine.sampling.engine import UNUSED_LOGPROB, TopK


@dataclass(slots=True)
class TopKRows:
    """Cells gathered position by position."""

    k: int
    token_ids: list[list[int]] = field(default_factory=list[list[int]])
    logprobs: list[list[float]] = field(default_factory=list[list[float]])

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append one position; short rows are filled up with unused cells."""
        missing = self.k - len(token_ids)
        self.token_ids.append([*token_ids, *[0] * missing])
        self.logprobs.append([*logprobs, *[UNUSED_LOGPROB] * missing])

    def freeze(self) -> TopK:
        """As the contract has it."""
        ids = torch.tensor(self.token_ids, dtype=torch.int32)
        values = torch.tensor(self.logprobs, dtype=torch.float32)
        return TopK(
            k=self.k,
            length=len(self.token_ids),
            token_ids=ids.numpy().astype("<i4").tobytes(),
            logprobs=values.numpy().astype("<f4").tobytes(),
        )


def of_tokens(logprobs_BV: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Entry `tokens[b]` of each row."""
    index = torch.tensor(tokens, device=logprobs_BV.device)[:, None]
    return logprobs_BV.gather(-1, index)[:, 0].tolist()


def most_likely(logprobs_BV: torch.Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """The k (or all, when there are fewer) most likely tokens of each row, most likely first."""
    top = logprobs_BV.topk(min(k, logprobs_BV.shape[-1]), dim=-1)
    return top.indices.tolist(), top.values.tolist()
