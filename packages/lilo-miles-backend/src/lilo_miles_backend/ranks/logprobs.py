"""Target logprobs: from hidden states to the logprob of each target, without ever holding all logits.

Logits exist for one chunk of tokens at a time, in float32; the forward keeps only their log-sum-exp, the backward
computes them again. The adapter of the head acts here, and its gradients go straight into its buffers, as those of the
other sites do (`lora.py`).

Shapes: N tokens, H hidden size, V vocabulary, k targets per position, C tokens of a chunk, r lora_rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.lora import Factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer, with the active adapter's factors for it."""

    weight_VH: torch.Tensor
    factors: Factors | None
    chunk_tokens: int


def target_logprobs(hidden_NH: torch.Tensor, targets_Nk: torch.Tensor, head: Head) -> torch.Tensor:
    """Logprob of each target, float32 [N, k]; differentiable in the hidden states and the head's factors."""
    return cast(torch.Tensor, _TargetLogprobs.apply(hidden_NH, targets_Nk, head))


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, hidden: torch.Tensor, targets: torch.Tensor, head: Head
    ) -> torch.Tensor:
        logprobs = hidden.new_empty(targets.shape, dtype=torch.float32)
        lse = hidden.new_empty(hidden.shape[0], 1, dtype=torch.float32)
        for rows in _chunks(hidden.shape[0], head.chunk_tokens):
            logits, _ = _logits(hidden[rows], head)
            torch.logsumexp(logits, 1, keepdim=True, out=lse[rows])
            logprobs[rows] = logits.gather(1, targets[rows]) - lse[rows]
        ctx.save_for_backward(hidden, targets, lse)
        ctx.head = head
        return logprobs

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        (grad,) = grads
        hidden, targets, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        for rows in _chunks(hidden.shape[0], ctx.head.chunk_tokens):
            # d logprob_j / d logit_v = [v is the target] - softmax_v, summed over the k targets.
            logits, h = _logits(hidden[rows], ctx.head)
            grad_logits = logits.sub_(lse[rows]).exp_().mul_(-grad[rows].sum(1, keepdim=True))
            grad_logits.scatter_add_(1, targets[rows], grad[rows])
            grad_hidden[rows] = _backward_chunk(grad_logits, hidden[rows], h, ctx.head)
        return grad_hidden, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _logits(hidden_CH: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Float32 logits [C, V] of a chunk, and A's products [C, r]."""
    logits = (hidden_CH @ head.weight_VH.t()).float()
    if head.factors is None:
        return logits, None
    h_Cr = hidden_CH.float() @ head.factors.a.t()
    return logits.addmm_(h_Cr, head.factors.b[0].t(), alpha=head.factors.scale), h_Cr


def _backward_chunk(
    grad_CV: torch.Tensor, hidden_CH: torch.Tensor, h_Cr: torch.Tensor | None, head: Head
) -> torch.Tensor:
    """Gradient of the hidden states [C, H]; adds to the gradients of the head's factors."""
    grad_hidden = grad_CV.to(head.weight_VH.dtype) @ head.weight_VH
    if head.factors is None or h_Cr is None:
        return grad_hidden
    factors = head.factors
    factors.grad_b[0].addmm_(grad_CV.t(), h_Cr, alpha=factors.scale)
    grad_h = (grad_CV @ factors.b[0]).mul_(factors.scale)
    factors.grad_a.addmm_(grad_h.t(), hidden_CH.float())
    return grad_hidden.add_((grad_h @ factors.a).to(grad_hidden.dtype))
