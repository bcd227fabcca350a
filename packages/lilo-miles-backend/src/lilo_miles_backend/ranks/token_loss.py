"""TokenLoss: the loss of one microbatch's tokens on this rank, evaluated chunk by chunk while the head runs.

Not the formulas (`losses.py`) and not the head (`logprobs.py`), which asks here for the slope of each chunk. All in
float64 per token, so that a token's loss and slope do not depend on where a batch is cut. Nothing is read back to the
host: losses stay on the device until the batch is answered.

Shapes: n tokens of this rank, k targets per position, C tokens of a chunk, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lilo_miles_backend.ranks.collectives import Axis, sum_in_place
from lilo_miles_backend.ranks.losses import SEQUENCE_LOG_RATIO, LossInputs, Objective


class TokenLoss:
    """Losses and slopes of n tokens."""

    def __init__(
        self, objective: Objective, tensors: Mapping[str, torch.Tensor], losses_nk: torch.Tensor
    ) -> None:
        """Evaluate later.

        Args:
            objective: the formula and its settings.
            tensors: the loss's inputs besides the logprobs, float64 [n, k].
            losses_nk: where each token's loss is written, float64.
        """
        self._objective = objective
        self._tensors = dict(tensors)
        self._losses = losses_nk

    def set_sequences(
        self, logprobs_nk: torch.Tensor, rows_n: torch.Tensor, num_rows: int, cp: Axis
    ) -> None:
        """Find what a token's loss needs of its whole row: the log of the sequence's ratio.

        Args:
            logprobs_nk: of all tokens of this rank.
            rows_n: int64, each token's row, equal for all context-parallel ranks.
            num_rows: rows of the microbatch.
            cp: the ranks that have the other tokens of the rows.
        """
        sums = logprobs_nk.new_zeros(num_rows, 2, dtype=torch.float64)
        mask = (self._tensors["sequence_ratio_mask"] != 0).double()
        distance = (logprobs_nk.double() - self._tensors["logprobs"]) * mask
        sums.index_add_(0, rows_n, torch.stack((distance.sum(1), mask.sum(1)), 1))
        sum_in_place(sums, cp)
        means = sums[:, 0] / sums[:, 1].clamp(min=1)
        self._tensors[SEQUENCE_LOG_RATIO] = means[rows_n].unsqueeze(1)

    def value(self, logprobs_nk: torch.Tensor) -> None:
        """Note the losses of all tokens; no slope is wanted."""
        with torch.no_grad():
            self._losses.copy_(self._evaluate(slice(None), logprobs_nk.double()))

    def slope(self, rows: slice, logprobs_Ck: torch.Tensor) -> torch.Tensor:
        """dL/dlogprob of a chunk, in the logprobs' type; notes its losses.

        0 where the loss is not finite: its request fails, and must leave nothing in what it shares with others.
        """
        with torch.enable_grad():
            p = logprobs_Ck.detach().double().requires_grad_()
            losses = self._evaluate(rows, p)
            (slope,) = torch.autograd.grad(losses.sum(), p)
        losses = losses.detach()
        self._losses[rows] = losses
        return slope.masked_fill_(~losses.isfinite(), 0).to(logprobs_Ck.dtype)

    def _evaluate(self, rows: slice, p: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(
            tensors={name: tensor[rows] for name, tensor in self._tensors.items()},
            config=self._objective.config,
        )
        return self._objective.formula(p, inputs)
