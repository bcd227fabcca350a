"""Merging attention over two disjoint sets of keys by their log-sum-exps, with torch; on GPU `triton_merge.py` does it.

With l = log(exp(l1) + exp(l2)): out = exp(l1 - l) out1 + exp(l2 - l) out2 (Milakov and Gimelshein, arXiv:1805.02867).
"""

from __future__ import annotations

import torch

from lilo_miles_backend.ranks.kernels.attention_kernel import Attended


def merge_(whole: Attended, part: Attended) -> None:
    """See `Merge`."""
    total = torch.logaddexp(whole.lse, part.lse)
    out = whole.out * _weights(whole.lse, total) + part.out * _weights(part.lse, total)
    whole.out.copy_(out)
    whole.lse.copy_(total)


def _weights(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """[B, S, N, 1]."""
    return (lse - total).exp_().transpose(1, 2).unsqueeze(-1)
