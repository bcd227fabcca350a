"""A pass: rows -> microbatches -> model -> head and loss -> gradients of the adapters.

A pass has one part per item that runs in it: usually one, which touches only its own adapter's buffers, so that its
numbers are bit for bit those it has alone. Where a definition packs models, all items of a batch are parts of one pass:
a microbatch may then hold rows of several models, each with its own adapter and its own failure.

Every tensor- and context-parallel rank runs the same microbatches, each context-parallel rank with its part of every
row; data-parallel ranks have rows of their own, perhaps none. Nothing here waits for the device: what is found goes to
`Answers`, which the caller reads when all passes of its batch are queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from lilo_definitions.trainer import Levels

from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.answers import Answers
from lilo_miles_backend.ranks.filling import BY_TOKENS, RowCost, fill, share
from lilo_miles_backend.ranks.kernels.short_segments import Segments
from lilo_miles_backend.ranks.logprobs import Head, HeadPass
from lilo_miles_backend.ranks.lora import Segment
from lilo_miles_backend.ranks.losses import Objective
from lilo_miles_backend.ranks.microbatch import Layout, Microbatch, assemble
from lilo_miles_backend.ranks.model import BaseModel
from lilo_miles_backend.ranks.rows import Row
from lilo_miles_backend.ranks.token_loss import TokenLoss
from lilo_miles_backend.ranks.transfer import sent


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    """Bounds on what one pass holds at once, and how its rows lie."""

    max_tokens: int
    """Padded tokens of a microbatch on one rank."""
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    layout: Layout
    levels: Callable[[int], Levels]
    """What layers keep of a microbatch of so many tokens on this rank."""
    cost: RowCost = BY_TOKENS
    """By which rows are shared out over data-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One item of a pass."""

    item: int
    """Its place in the answers."""
    adapter: Adapter
    rows: Sequence[Row]


@dataclass(slots=True, kw_only=True)
class PassSize:
    """How much a pass computed on this rank."""

    microbatches: int
    padded_tokens: list[int]
    """Of each part, with all padding."""
    longest_tokens: int = 0
    """Of its microbatches, with all padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The consecutive rows of one part in a microbatch, as slices of its per-token arrays."""

    part: Part
    model: slice
    """Of the T tokens of this rank."""
    here: slice
    """Of the n real ones."""


def run_pass(
    model: BaseModel,
    parts: Sequence[Part],
    objective: Objective,
    limits: PassLimits,
    answers: Answers,
    *,
    forward_only: bool,
    moved: Callable[[], None],
) -> PassSize:
    """Run this rank's share of valid rows; adds to the adapters' gradients unless `forward_only`.

    What is not finite of one part stays in its own answer and its own adapter's buffers: the caller drops them.
    `moved` is called after each microbatch, so that a long pass is seen to get on.
    """
    owners = [index for index, part in enumerate(parts) for _ in part.rows]
    # Adapters of one rank next to each other, since kernels may take such neighbours together.
    order = [(parts[owner].adapter.spec.lora_rank, owner) for owner in owners]
    rows = [row for part in parts for row in part.rows]
    firsts = [first for part in parts for first in answers.firsts[part.item]]
    dp, layout = model.parallel.dp, limits.layout
    mine = share([row.length for row in rows], dp.size, limits.cost)[dp.rank]
    sizes = [layout.alignment.padded(rows[index].length) for index in mine]
    groups = fill(sizes, limits.max_tokens * layout.cp_size)
    size = PassSize(microbatches=len(groups), padded_tokens=[0] * len(parts))
    for group in groups:
        chosen = tuple(sorted((mine[place] for place in group), key=lambda index: order[index]))
        microbatch = assemble(rows, chosen, layout, firsts)
        spans = _spans(microbatch, [owners[index] for index in chosen], parts, layout)
        _run_microbatch(
            model, objective, microbatch, spans, limits, answers, backward=not forward_only
        )
        size.longest_tokens = max(size.longest_tokens, microbatch.tokens_T.size)
        for index in {owners[index] for index in chosen}:
            size.padded_tokens[index] += _padded(spans, parts[index], microbatch)
        moved()
    return size


def _spans(
    microbatch: Microbatch, owners: Sequence[int], parts: Sequence[Part], layout: Layout
) -> list[_Span]:
    if len(set(owners)) == 1:
        return [_Span(part=parts[owners[0]], model=slice(None), here=slice(None))]
    spans: list[_Span] = []
    row = model = here = 0
    for owner, group in groupby(owners):
        count = len(list(group))
        padded = sum(map(layout.alignment.padded, microbatch.lengths[row : row + count]))
        size = padded // layout.cp_size
        real = int(microbatch.stream.is_real[model : model + size].sum())
        spans.append(
            _Span(
                part=parts[owner],
                model=slice(model, model + size),
                here=slice(here, here + real),
            )
        )
        row, model, here = row + count, model + size, here + real
    return spans


def _padded(spans: Sequence[_Span], part: Part, microbatch: Microbatch) -> int:
    """Positions of a part; the stream's own padding is the last one's."""
    total = microbatch.tokens_T.size
    if len(spans) == 1:
        return total
    here = sum(span.model.stop - span.model.start for span in spans if span.part is part)
    return here + (microbatch.padding if spans[-1].part is part else 0)


def _run_microbatch(
    model: BaseModel,
    objective: Objective,
    microbatch: Microbatch,
    spans: Sequence[_Span],
    limits: PassLimits,
    answers: Answers,
    *,
    backward: bool,
) -> None:
    """Forward, head and loss, backward; all that is found goes to the answers."""
    device = model.device.torch_device
    model.activate(*((span.part.adapter, span.model) for span in spans))
    with_grad = backward and any(span.part.adapter.trains_decoder for span in spans)
    if with_grad:
        model.keep(limits.levels(microbatch.tokens_T.size))
    tokens_1T = sent(microbatch.tokens_T, device)[None]
    hidden = model.hidden(tokens_1T, microbatch.stream, with_grad=with_grad)
    flat_TH = hidden.detach().flatten(0, -2)
    places = None if microbatch.is_prefix else sent(microbatch.places_n, device)
    count = microbatch.places_n.size
    hidden_nH = flat_TH[:count] if places is None else flat_TH.index_select(0, places)
    with torch.no_grad():
        logprobs, losses = _head_and_loss(
            model,
            objective,
            microbatch,
            spans,
            limits.chunk_tokens,
            hidden_nH,
            backward=backward,
            in_place=with_grad,
        )
        answers.put(microbatch, logprobs)
        for span in spans:
            answers.add_loss(span.part.item, losses[span.here].sum())
        if with_grad:
            # The hidden states have become their gradient; that of padding is zero.
            if places is None:
                flat_TH[count:] = 0
            else:
                flat_TH.zero_().index_copy_(0, places, hidden_nH)
    if with_grad:
        hidden.backward(flat_TH.view_as(hidden))


def _head_and_loss(
    model: BaseModel,
    objective: Objective,
    microbatch: Microbatch,
    spans: Sequence[_Span],
    chunk_tokens: int,
    hidden_nH: torch.Tensor,
    *,
    backward: bool,
    in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and losses [n, k]; adds to the heads' gradients, and turns the hidden states into theirs `in_place`."""
    device = hidden_nH.device
    targets_nk = sent(microbatch.targets_nk, device)
    losses_nk = torch.empty(targets_nk.shape, dtype=torch.float64, device=device)
    tensors = {name: sent(x, device).double() for name, x in microbatch.inputs.items()}
    loss = TokenLoss(objective, tensors, losses_nk)
    parts = _heads(model, spans, chunk_tokens)
    heads = [HeadPass(hidden_nH[here], targets_nk[here], head) for here, head in parts]
    logprobs = None
    if objective.by_sequence or not backward:
        logprobs = torch.cat([head.logprobs(keep=backward and len(heads) == 1) for head in heads])
    if objective.by_sequence and logprobs is not None:
        rows = sent(microbatch.rows_n, device)
        loss.set_sequences(logprobs, rows, len(microbatch.rows), model.parallel.cp)
    if backward:
        logprobs = torch.cat(
            [
                head.backward(_shifted(loss, here), hidden_nH[here] if in_place else None)
                for head, (here, _) in zip(heads, parts, strict=True)
            ]
        )
    assert logprobs is not None, "one of the two ways has made them"
    if not backward:
        loss.value(logprobs)
    return logprobs, losses_nk


def _heads(model: BaseModel, spans: Sequence[_Span], chunk_tokens: int) -> list[tuple[slice, Head]]:
    """Real tokens one after another with the head that they go through.

    On a CPU all together, unless their logits are wider than they are. Else neighbours without an adapter of it are.
    """
    found: list[tuple[slice, Head]] = []
    for span in spans:
        here, head = span.here, model.head(span.part.adapter, chunk_tokens)
        if found and head.factors is None and found[-1][1].factors is None:
            here = slice(found.pop()[0].start, here.stop)
        found.append((here, head))
    weight = found[0][1].weight_VH
    if len(found) == 1 or weight.is_cuda or weight.dtype not in (torch.float32, torch.float64):
        return found
    segments = Segments(
        Segment(factors=head.factors, tokens=here)
        for here, head in found
        if head.factors is not None
    )
    return [(slice(None), replace(found[0][1], factors=None, segments=segments))]


def _shifted(loss: TokenLoss, here: slice) -> Callable[[slice, torch.Tensor], torch.Tensor]:
    """The loss's slope, asked for by places among these tokens."""
    first = here.start or 0

    def slope(rows: slice, logprobs_Ck: torch.Tensor) -> torch.Tensor:
        return loss.slope(slice(first + rows.start, first + rows.stop), logprobs_Ck)

    return slope
