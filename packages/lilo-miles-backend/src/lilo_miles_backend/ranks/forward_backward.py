"""A pass: rows -> microbatches -> model -> logprobs -> loss -> gradients of the adapters.

A pass has one part per item that runs in it: usually one, which touches only its own adapter's buffers, so that its
numbers are bit for bit those it has alone. Where a definition packs models, all items of a batch are parts of one pass:
a microbatch may then hold rows of several models, each with its own adapter, its own loss and its own failure.

Every tensor- and context-parallel rank runs the same microbatches, and all of them see whole rows' logprobs; each
data-parallel rank has rows of its own, perhaps none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.collectives import copied, replicated
from lilo_miles_backend.ranks.logprobs import target_logprobs
from lilo_miles_backend.ranks.losses import LossInputs, Objective
from lilo_miles_backend.ranks.microbatch import Layout, Microbatch, assemble, cut, in_order, share
from lilo_miles_backend.ranks.model import BaseModel
from lilo_miles_backend.ranks.rows import Array, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    """Bounds on what one pass holds at once, and how its rows lie."""

    max_tokens: int
    """Padded tokens of a microbatch on one rank."""
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One item of a pass."""

    adapter: Adapter
    rows: Sequence[Row]


@dataclass(slots=True, kw_only=True)
class PartResult:
    """What this rank computed of one part."""

    logprobs: dict[int, Array] = field(default_factory=dict[int, Array])
    """float32, by the row's index, of the shape of its targets; the rows of this data-parallel rank."""
    loss: float = 0.0
    padded_tokens: int = 0
    failure: str | None = None
    """Why nothing of this part may reach an optimizer; its gradients may be half-added: the caller drops them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The consecutive rows of one part in a microbatch, as slices of its per-token arrays."""

    part: int
    padded_tokens: int
    model: slice
    """Of the model's tokens on this rank, flattened in its own order."""
    here: slice
    """Of the n real tokens of this rank."""
    tokens: slice
    """Of the N real tokens."""


def run_pass(
    model: BaseModel,
    parts: Sequence[Part],
    objective: Objective,
    limits: PassLimits,
    *,
    forward_only: bool,
    moved: Callable[[], None],
) -> list[PartResult]:
    """Run this rank's share of valid rows; adds to the adapters' gradients unless `forward_only`.

    `moved` is called after each microbatch, so that a long pass is seen to get on.
    """
    owners = [index for index, part in enumerate(parts) for _ in part.rows]
    rows = [row for part in parts for row in part.rows]
    dp = model.parallel.dp
    mine = share([row.length for row in rows], dp.size)[dp.rank]
    owners, here = [owners[index] for index in mine], [rows[index] for index in mine]
    results = [PartResult() for _ in parts]
    values: list[tuple[Microbatch, Array]] = []
    for group in cut([row.length for row in here], limits.max_tokens, limits.layout):
        if all(results[owners[index]].failure for index in group):
            continue
        ordered = tuple(sorted(group, key=lambda index: owners[index]))
        microbatch = assemble(here, ordered, limits.layout)
        spans = _spans(microbatch, [owners[index] for index in ordered], limits.layout)
        logprobs = _run_microbatch(
            model,
            parts,
            objective,
            microbatch,
            spans,
            results,
            limits.chunk_tokens,
            backward=not forward_only,
        )
        values.append((microbatch, logprobs))
        moved()
    _take_apart(results, in_order(values, here), owners, mine, parts)
    return results


def _take_apart(
    results: list[PartResult],
    found: dict[int, Array],
    owners: Sequence[int],
    mine: Sequence[int],
    parts: Sequence[Part],
) -> None:
    """Give each part its rows' logprobs, by their index in the part."""
    first_rows = [0]
    for part in parts:
        first_rows.append(first_rows[-1] + len(part.rows))
    for index, values in found.items():
        owner = owners[index]
        results[owner].logprobs[mine[index] - first_rows[owner]] = values


def _spans(microbatch: Microbatch, owners: Sequence[int], layout: Layout) -> list[_Span]:
    lengths = microbatch.lengths
    whole = slice(None)
    if len(set(owners)) == 1:
        size = microbatch.tokens_BS.size * layout.cp_size
        return [_Span(part=owners[0], padded_tokens=size, model=whole, here=whole, tokens=whole)]
    spans: list[_Span] = []
    row = model = tokens = here = 0
    stream = microbatch.stream
    assert stream is not None, "rows of several models run together only in a stream"
    for owner, group in groupby(owners):
        count = len(list(group))
        real = sum(lengths[row : row + count])
        padded = sum(map(layout.alignment.padded, lengths[row : row + count]))
        size = padded // layout.cp_size
        real_here = int(stream.is_real[model : model + size].sum())
        spans.append(
            _Span(
                part=owner,
                padded_tokens=padded,
                model=slice(model, model + size),
                here=slice(here, here + real_here),
                tokens=slice(tokens, tokens + real),
            )
        )
        row, model, here, tokens = row + count, model + size, here + real_here, tokens + real
    return spans


def _run_microbatch(
    model: BaseModel,
    parts: Sequence[Part],
    objective: Objective,
    microbatch: Microbatch,
    spans: Sequence[_Span],
    results: Sequence[PartResult],
    chunk_tokens: int,
    *,
    backward: bool,
) -> Array:
    """Logprobs [N, k] of one microbatch; adds its losses to the parts' results."""
    device = model.device.torch_device
    adapters = [(parts[span.part].adapter, span) for span in spans]
    model.activate(*((adapter, span.model) for adapter, span in adapters))
    with_grad = backward and any(adapter.trains_decoder for adapter, _ in adapters)
    tokens = torch.from_numpy(microbatch.tokens_BS).to(device)
    hidden_SBH = model.hidden(tokens, microbatch.stream, with_grad=with_grad)
    with torch.set_grad_enabled(backward):
        hidden_nH = _real_tokens(hidden_SBH, microbatch)
        if with_grad:
            hidden_nH = copied(hidden_nH, model.parallel.tp)
        elif backward:
            # Only the head is trained: the graph starts here, and the decoder is not walked backwards.
            hidden_nH.requires_grad_()
        targets = torch.from_numpy(microbatch.targets_nk).to(device)
        found = [
            target_logprobs(
                hidden_nH[span.here], targets[span.here], model.head(adapter, chunk_tokens)
            )
            for adapter, span in adapters
        ]
        logprobs_nk = found[0] if len(found) == 1 else torch.cat(found)
        logprobs_Nk = _whole_rows(logprobs_nk, microbatch, model)
        losses = objective.formula(
            logprobs_Nk.double(), _loss_inputs(microbatch, objective, device)
        )
        loss = _loss(losses, spans, results)
        if backward and loss is not None:
            loss.backward()
    return logprobs_Nk.detach().cpu().numpy()


def _loss(
    losses_Nk: torch.Tensor, spans: Sequence[_Span], results: Sequence[PartResult]
) -> torch.Tensor | None:
    """The sum over the parts that are finite; notes each part's loss, or its failure. None: nothing is left."""
    healthy: list[torch.Tensor] = []
    for span in spans:
        result = results[span.part]
        loss = losses_Nk[span.tokens].sum()
        value = loss.detach().item()
        result.loss += value
        result.padded_tokens += span.padded_tokens
        if not math.isfinite(value):
            result.failure = result.failure or (
                f"the loss of this request is {value}, so none of its gradients are used; look for huge "
                "weights, advantages or logprobs, or for an earlier step with too large a learning rate"
            )
        if result.failure is None:
            healthy.append(loss)
    return sum(healthy[1:], start=healthy[0]) if healthy else None


def _real_tokens(hidden_SBH: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    """Hidden states of this rank's tokens that are no padding, row after row: [n, H]."""
    flat = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
    if microbatch.is_full and hidden_SBH.shape[1] == 1:
        return flat
    return flat.index_select(0, torch.from_numpy(microbatch.positions_n).to(flat.device))


def _whole_rows(
    logprobs_nk: torch.Tensor, microbatch: Microbatch, model: BaseModel
) -> torch.Tensor:
    """Logprobs of whole rows [N, k] from the parts of all context-parallel ranks.

    Every rank then computes the loss of whole rows (a sequence's ratio needs them), and walks back through its own part.
    """
    if microbatch.order_N is None:
        return logprobs_nk
    device = logprobs_nk.device
    places = torch.from_numpy(microbatch.positions_n).to(device)
    here = logprobs_nk.new_zeros(microbatch.tokens_BS.size, logprobs_nk.shape[1])
    everywhere = replicated(here.index_copy(0, places, logprobs_nk), model.parallel.cp)
    return everywhere.index_select(0, torch.from_numpy(microbatch.order_N).to(device))


def _loss_inputs(microbatch: Microbatch, objective: Objective, device: torch.device) -> LossInputs:
    return LossInputs(
        tensors={
            name: torch.from_numpy(values).to(device, torch.float64)
            for name, values in microbatch.inputs.items()
        },
        lengths=microbatch.lengths,
        config=objective.config,
    )
