"""One item's pass: datums -> microbatches -> model -> logprobs -> loss -> gradients of its adapter.

Items run one after another and touch only their own adapter's buffers, so an item's numbers are bit for bit those it
has alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lilo_engine.operations.datum import Datum

from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.logprobs import Head, target_logprobs
from lilo_miles_backend.ranks.lora import HEAD_SITE
from lilo_miles_backend.ranks.losses import LossInputs, Objective
from lilo_miles_backend.ranks.microbatch import Microbatch, assemble, cut, in_order
from lilo_miles_backend.ranks.model import BaseModel
from lilo_miles_backend.ranks.rows import Array, make_row


class NonFiniteLoss(Exception):
    """An item's loss is infinite or not a number; nothing of it may reach the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    """Bounds on what one pass holds at once."""

    max_tokens: int
    """Padded tokens of a microbatch."""
    chunk_tokens: int
    """Tokens whose logits exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """One item's numbers."""

    logprobs: list[Array]
    """float32, one per datum in order, of the shape of its targets."""
    metrics: dict[str, float]


def run_pass(
    model: BaseModel,
    adapter: Adapter,
    objective: Objective,
    datums: Sequence[Datum],
    limits: PassLimits,
    *,
    forward_only: bool,
    moved: Callable[[], None],
) -> PassResult:
    """Run one item of valid datums; adds to the adapter's gradients unless `forward_only`.

    `moved` is called after each microbatch, so that a long pass is seen to get on.

    Raises:
        NonFiniteLoss: the loss is not finite. Gradients may be half-added: the caller drops them.
    """
    rows = [make_row(datum) for datum in datums]
    model.activate(adapter)
    parts: list[tuple[Microbatch, Array]] = []
    total = 0.0
    groups = cut([row.length for row in rows], limits.max_tokens)
    for group in groups:
        microbatch = assemble(rows, group)
        loss, logprobs = _run_microbatch(
            model, adapter, objective, microbatch, limits.chunk_tokens, backward=not forward_only
        )
        total += loss
        parts.append((microbatch, logprobs))
        moved()
    if not forward_only:
        adapter.num_passes += 1
    return PassResult(
        logprobs=in_order(parts, rows),
        metrics={
            "loss:sum": total,
            "tokens:sum": float(sum(row.length for row in rows)),
            "padded_tokens:sum": float(sum(part.tokens_BS.size for part, _ in parts)),
        },
    )


def _run_microbatch(
    model: BaseModel,
    adapter: Adapter,
    objective: Objective,
    microbatch: Microbatch,
    chunk_tokens: int,
    *,
    backward: bool,
) -> tuple[float, Array]:
    """Loss and logprobs [N, k] of one microbatch."""
    head = Head(
        weight_VH=model.head_weight,
        factors=adapter.factors.get(HEAD_SITE),
        chunk_tokens=chunk_tokens,
    )
    device = model.device.torch_device
    tokens = torch.from_numpy(microbatch.tokens_BS).to(device)
    targets = torch.from_numpy(microbatch.targets_Nk).to(device)
    hidden_SBH = model.hidden(tokens, with_grad=backward and adapter.trains_decoder)
    with torch.set_grad_enabled(backward):
        hidden_NH = _real_tokens(hidden_SBH, microbatch)
        if backward and not hidden_NH.requires_grad:
            # Only the head is trained: the graph starts here, and the decoder is not walked backwards.
            hidden_NH.requires_grad_()
        logprobs_Nk = target_logprobs(hidden_NH, targets, head)
        loss = objective.formula(
            logprobs_Nk.double(), _loss_inputs(microbatch, objective, device)
        ).sum()
        value = loss.detach().item()
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the loss of this request is {value}, so none of its gradients are used; look for huge "
                "weights, advantages or logprobs, or for an earlier step with too large a learning rate"
            )
        if backward:
            loss.backward()
    return value, logprobs_Nk.detach().cpu().numpy()


def _real_tokens(hidden_SBH: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    """Hidden states of the tokens that are no padding, row after row: [N, H]."""
    flat = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
    if microbatch.is_full and hidden_SBH.shape[1] == 1:
        return flat
    return flat.index_select(0, torch.from_numpy(microbatch.positions_N).to(flat.device))


def _loss_inputs(microbatch: Microbatch, objective: Objective, device: torch.device) -> LossInputs:
    return LossInputs(
        tensors={
            name: torch.from_numpy(values).to(device, torch.float64)
            for name, values in microbatch.inputs.items()
        },
        lengths=microbatch.lengths,
        config=objective.config,
    )
