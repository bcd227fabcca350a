"""Target logprobs: from hidden states to the logprob of each target, without ever holding all logits.

Logits exist for one chunk of tokens at a time, in float32; the forward keeps only their log-sum-exp, the backward
computes them again (unless one chunk is all there is). The adapter of the head acts here, and its gradients go straight into its buffers, as those of the
other sites do (`lora.py`).

Tensor-parallel ranks hold parts of the vocabulary. They exchange two floats a token and target: each rank's
log-sum-exp and the target's logit, which one of them has. The gradient of the hidden states is partial on each rank;
whoever passes them in has it summed (`collectives.copied`).

Shapes: N tokens, H hidden size, V vocabulary (this rank's part), k targets per position, C tokens of a chunk,
r lora_rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.collectives import ALONE, Axis, stacked
from lilo_miles_backend.ranks.lora import Factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer, with the active adapter's factors for it."""

    weight_VH: torch.Tensor
    factors: Factors | None
    chunk_tokens: int
    first_entry: int = 0
    """Token id of this rank's first vocabulary entry."""
    tp: Axis = ALONE
    """The ranks that hold the other entries."""


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
        places, absent = _places(targets, head)
        chunks = _chunks(hidden.shape[0], head.chunk_tokens)
        ctx.kept = None
        for rows in chunks:
            logits, h = _logits(hidden[rows], head)
            if len(chunks) == 1 and ctx.needs_input_grad[0]:
                ctx.kept = (
                    logits,
                    h,
                )  # as many as one chunk may have: computing them again would save nothing
            torch.logsumexp(logits, 1, keepdim=True, out=lse[rows])
            logprobs[rows] = logits.gather(1, places[rows])
        if absent is not None:
            lse, logprobs = _over_vocabulary(lse, logprobs.masked_fill_(absent, 0), head.tp)
        logprobs -= lse
        ctx.save_for_backward(hidden, places, absent, lse)
        ctx.head = head
        return logprobs

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        (grad,) = grads
        hidden, places, absent, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        at_targets = grad if absent is None else grad.masked_fill(absent, 0)
        for rows in _chunks(hidden.shape[0], ctx.head.chunk_tokens):
            # d logprob_j / d logit_v = [v is the target] - softmax_v, summed over the k targets.
            logits, h = ctx.kept or _logits(hidden[rows], ctx.head)
            ctx.kept = None
            grad_logits = logits.sub_(lse[rows]).exp_().mul_(-grad[rows].sum(1, keepdim=True))
            grad_logits.scatter_add_(1, places[rows], at_targets[rows])
            grad_hidden[rows] = _backward_chunk(grad_logits, hidden[rows], h, ctx.head)
        return grad_hidden, None, None


def _places(targets_Nk: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each target among this rank's entries, and where it is another rank's; None: all entries are here."""
    if not head.tp.is_split:
        return targets_Nk, None
    places = targets_Nk - head.first_entry
    absent = (places < 0) | (places >= head.weight_VH.shape[0])
    return places.masked_fill(absent, 0), absent


def _over_vocabulary(
    lse_N1: torch.Tensor, logits_Nk: torch.Tensor, tp: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and target logits over all entries, from those of each part; equal bits on every rank."""
    parts = stacked(torch.cat((lse_N1, logits_Nk), 1), tp)
    return torch.logsumexp(parts[:, :, :1], 0), parts[:, :, 1:].sum(0)


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _logits(hidden_CH: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Float32 logits [C, V] of a chunk, and A's products [C, r]."""
    logits = (hidden_CH @ head.weight_VH.t()).float()
    if head.factors is None:
        return logits, None
    h_Cr = hidden_CH.float() @ head.factors.a.float().t()
    return logits.addmm_(h_Cr, head.factors.b.float().t(), alpha=head.factors.scale), h_Cr


def _backward_chunk(
    grad_CV: torch.Tensor, hidden_CH: torch.Tensor, h_Cr: torch.Tensor | None, head: Head
) -> torch.Tensor:
    """Gradient of the hidden states [C, H]; adds to the gradients of the head's factors."""
    grad_hidden = grad_CV.to(head.weight_VH.dtype) @ head.weight_VH
    if head.factors is None or h_Cr is None:
        return grad_hidden
    factors = head.factors
    factors.grad_b.addmm_(grad_CV.t(), h_Cr, alpha=factors.scale)
    grad_h = (grad_CV @ factors.b.float()).mul_(factors.scale)
    factors.grad_a.addmm_(grad_h.t(), hidden_CH.float())
    return grad_hidden.add_((grad_h @ factors.a.float()).to(grad_hidden.dtype))
