"""Attention over streams: every way to put it together, in float64, against torch's autograd through a dense mask."""

from __future__ import annotations

import math
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_miles_backend.ranks.attention import Attention, PackedRows
from lilo_miles_backend.ranks.attention_plan import (
    REMEMBERED,
    DenseCall,
    DenseRule,
    plan_calls,
    stretches,
)
from lilo_miles_backend.ranks.collectives import Axis
from lilo_miles_backend.ranks.kernels import attention_reference
from lilo_miles_backend.ranks.kernels.attention_choice import (
    TOLERANCE,
    Case,
    Choice,
    choose_attention,
    dense_error,
    packed_error,
)
from lilo_miles_backend.ranks.kernels.attention_cudnn import CudnnAttention
from lilo_miles_backend.ranks.kernels.attention_fa4 import Fa4Attention
from lilo_miles_backend.ranks.kernels.attention_flash import FlashAttention, FlashPackedAttention
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionKernels,
    DenseAttention,
    PackedBounds,
)
from lilo_miles_backend.ranks.kernels.attention_merge import merge_
from lilo_miles_backend.ranks.kernels.attention_reference import (
    CpuAttention,
    PlainAttention,
    PlainPackedAttention,
)
from lilo_miles_backend.ranks.stream import Stream, pack

from tests.miles_backend import reference as ref

EXACT = 1e-12
"""max|d| / max|ref|, float64 on both sides: some hundred roundings of 1e-16."""
HEADS, GROUPS, SIZE = 4, 2, 8
CPU = torch.device("cpu")
PACKS = AttentionKernels(
    dense=CpuAttention(),
    packed=PlainPackedAttention(),
    merge=merge_,
    dense_from=12,
    dense_at_once_from=12,
    description="short rows in packed calls, as on a GPU",
)
KERNELS = {
    "dense": choose_attention(CPU, torch.float64, head_dim=SIZE, sharing=HEADS // GROUPS),
    "packed": PACKS,
}
ROWS = {
    "one row": ([24], [24]),
    "neighbours of one length": ([8, 8, 8, 16], [8, 8, 8, 16]),
    "odd lengths": ([17, 3, 9, 1, 2, 5, 16], [24, 8, 16, 8, 8, 8, 16]),
    "filled up": ([24, 8, 5, 0], [24, 8, 8, 24]),
}
"""Real and padded tokens; every padded length divides by 8, as four ranks need."""


@dataclass(frozen=True)
class Problem:
    """A whole stream, the same on every rank."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], padded: Sequence[int]) -> Problem:
        generator = torch.Generator().manual_seed(0)
        total = sum(padded)
        q, k, v, grad = (
            torch.randn(total, heads, SIZE, generator=generator, dtype=torch.float64)
            for heads in (HEADS, GROUPS, GROUPS, HEADS)
        )
        return cls(q=q, k=k, v=v, grad=grad * _is_real(lengths, padded)[:, None, None])

    def right(self, lengths: Sequence[int], padded: Sequence[int]) -> list[torch.Tensor]:
        """Output and gradients by a mask over the whole stream; what no one reads is zero."""
        q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        row = torch.repeat_interleave(torch.arange(len(padded)), torch.tensor(padded))
        place = torch.arange(len(row))
        seen = (row[:, None] == row[None]) & (place[:, None] >= place[None])
        wide = [x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v)]
        scores = torch.einsum("qhd,khd->hqk", q, wide[0]) / math.sqrt(SIZE)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, wide[1])
        grads = torch.autograd.grad(out, (q, k, v), self.grad)
        return [out.detach() * _is_real(lengths, padded)[:, None, None], *grads]


def _is_real(lengths: Sequence[int], padded: Sequence[int]) -> torch.Tensor:
    return torch.cat(
        [torch.arange(size) < length for length, size in zip(lengths, padded, strict=True)]
    )


def _attend(
    attention: Attention, problem: Problem, stream: Stream, rows: PackedRows
) -> list[torch.Tensor]:
    """Output and gradients of one rank's tokens."""
    places = torch.from_numpy(stream.places)
    q, k, v, grad = (x[places] for x in (problem.q, problem.k, problem.v, problem.grad))
    scale = 1 / math.sqrt(SIZE)
    attended = attention.forward(q, attention.keys(k, v), rows, scale)
    grads = attention.backward(grad, q, attention.keys(k, v), attended, rows, scale)
    return [attended.out * torch.from_numpy(stream.is_real)[:, None, None], *grads]


def _worst(ours: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    return max(ref.relative(one, other) for one, other in zip(ours, right, strict=True))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_one_rank_has_the_numbers_of_a_mask_over_the_whole_stream(kernels: str, rows: str) -> None:
    lengths, padded = ROWS[rows]
    problem, stream = Problem.of(lengths, padded), pack(lengths, padded, 0, 1)
    ours = _attend(Attention(KERNELS[kernels]), problem, stream, PackedRows.of(stream, CPU))
    assert _worst(ours, problem.right(lengths, padded)) <= EXACT


@dataclass(frozen=True)
class Cut:
    """What the ranks along one axis computed."""

    outs: list[list[torch.Tensor]]
    """By rank: output and gradients."""
    repeats: bool
    """Whether a second time gave the same bits on all ranks."""


Cuts = dict[tuple[str, str, int], Cut]


@pytest.fixture(scope="module")
def cuts() -> Cuts:
    """Every case on two and on four ranks, in one world of four processes over gloo."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lilo_miles_backend.ranks.rank", __name__])
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{Path(folder) / 'meet'}"
        pipes, processes = [], []
        for rank in range(4):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_serve, args=(theirs, meet, rank), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        found = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(120), f"rank {rank} gave no answer within 120 s"
            found.append(pipe.recv())
        for process in processes:
            process.join(30)
    assert not [one for one in found if isinstance(one, str)], found
    return {
        case: Cut(
            outs=[list(map(torch.from_numpy, one[case][0])) for one in found[: case[2]]],
            repeats=all(one[case][1] for one in found),
        )
        for case in found[0]
    }


def _serve(pipe: Connection, meet: str, rank: int) -> None:
    """One rank: all cases, and what went wrong as text."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    pairs = [cast(dist.ProcessGroup, dist.new_group(pair)) for pair in ([0, 1], [2, 3])]
    axes = [
        Axis(name="cp", rank=rank % 2, size=2, group=pairs[rank // 2]),
        Axis(name="cp", rank=rank, size=4, group=cast(dist.ProcessGroup, dist.group.WORLD)),
    ]
    found: dict[tuple[str, str, int], tuple[list[Any], bool]] = {}
    try:
        for kernels, rows, axis in product(KERNELS, ROWS, axes):
            lengths, padded = ROWS[rows]
            problem, attention = Problem.of(lengths, padded), Attention(KERNELS[kernels], axis)
            stream = pack(lengths, padded, axis.rank, axis.size)
            packed = PackedRows.of(stream, CPU)
            once, again = (_attend(attention, problem, stream, packed) for _ in range(2))
            same = all(torch.equal(*pair) for pair in zip(once, again, strict=True))
            # As arrays: a tensor would lie in memory that this process shares, and it ends.
            found[kernels, rows, axis.size] = ([one.numpy() for one in once], same)
        pipe.send(found)
    except Exception:
        pipe.send(traceback.format_exc())
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_ranks_that_cut_rows_have_the_numbers_of_a_mask_and_the_same_bits_each_time(
    cuts: Cuts, kernels: str, rows: str, cp: int
) -> None:
    lengths, padded = ROWS[rows]
    right = Problem.of(lengths, padded).right(lengths, padded)
    cut = cuts[kernels, rows, cp]
    places = np.concatenate([pack(lengths, padded, rank, cp).places for rank in range(cp)])
    whole = [torch.empty_like(one) for one in right]
    for index, one in enumerate(whole):
        one[torch.from_numpy(places)] = torch.cat([outs[index] for outs in cut.outs])
    assert _worst(whole, right) <= EXACT
    assert cut.repeats


def test_a_wrong_kernel_is_seen_by_the_check_at_start() -> None:
    class Shifted(CpuAttention):
        """Forgets the mask."""

        def forward(self, q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Attended:
            return super().forward(q, k, v, causal=False, scale=scale)

    class Scaled(PlainPackedAttention):
        """Gets its scale wrong."""

        def forward(
            self, q: Any, k: Any, v: Any, bounds: PackedBounds, *, scale: float
        ) -> Attended:
            return super().forward(q, k, v, bounds, scale=scale * 1.1)

    bf16 = torch.bfloat16
    assert dense_error(CpuAttention(), Case(CPU, bf16, 64, 2)) <= TOLERANCE / 2
    assert packed_error(PlainPackedAttention(), Case(CPU, bf16, 64, 2)) <= TOLERANCE / 2
    assert dense_error(Shifted(), Case(CPU, bf16, 64, 2)) > TOLERANCE
    assert packed_error(Scaled(), Case(CPU, bf16, 64, 2)) > TOLERANCE


def test_kernels_that_raise_or_are_wrong_are_put_aside_with_the_reason() -> None:
    # What this build of torch cannot run on a CPU stands for what a card cannot run.
    choice = Choice()
    kernel = choice.first(
        (Fa4Attention, CudnnAttention, FlashAttention, CpuAttention),
        lambda one: dense_error(one, Case(CPU, torch.bfloat16, 64, 2)),
    )
    assert isinstance(kernel, CpuAttention)
    assert [note.split()[0] for note in choice.notes] == ["cuDNN", "FA2"]


def test_plain_formulas_are_those_of_torch_and_their_gradients_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_reference, "QUERIES_AT_ONCE", 3)
    q, k, v, grad = (
        torch.randn(2, length, heads, SIZE, dtype=torch.float64)
        for length, heads in ((7, HEADS), (9, GROUPS), (9, GROUPS), (7, HEADS))
    )
    for one in (q, k, v):
        one.requires_grad_()
    for causal in (False, True):
        mask = torch.ones(7, 9, dtype=torch.bool).tril(2 if causal else 9)
        first = (x.transpose(1, 2) for x in (q, k, v))
        right = torch.nn.functional.scaled_dot_product_attention(
            *first, attn_mask=mask, scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        right_grads = torch.autograd.grad(right, (q, k, v), grad)
        right = right.detach()
        with torch.no_grad():
            ours = PlainAttention().forward(q, k, v, causal=causal, scale=0.3)
            grads = PlainAttention().backward(grad, q, k, v, ours, causal=causal, scale=0.3)
        assert _worst([ours.out, *grads], [right, *right_grads]) <= EXACT


@given(
    st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_every_real_row_is_in_one_call_and_only_rows_of_one_length_share_a_dense_one(
    shares: list[int], cp: int, dense_from: int
) -> None:
    size = 2**cp
    here = [2 * share for share in shares]
    padded = [length * size for length in here]
    lengths = [length if index % 4 else 0 for index, length in enumerate(padded)]
    rule = DenseRule(replace(PACKS, dense_from=dense_from, dense_at_once_from=dense_from))
    calls = plan_calls(lengths, padded, cp_rank=0, cp_size=size, is_dense=rule, device=CPU)
    starts = np.concatenate(([0], np.cumsum(here)))
    covered = [token for call in calls for token in range(call.tokens.start, call.tokens.stop)]
    wanted = [
        token
        for index, length in enumerate(lengths)
        if length
        for token in range(starts[index], starts[index + 1])
    ]
    assert covered == wanted
    for call in calls:
        rows = [i for i in range(len(here)) if call.tokens.start <= starts[i] < call.tokens.stop]
        if isinstance(call, DenseCall):
            assert {here[i] for i in rows} == {call.length}
            assert call.rows * call.length**2 >= dense_from**2
        else:
            assert all(part.bounds.queries.diff().tolist() for part in call.parts)
            assert len(call.parts) == (1 if size == 1 else 2)


def test_long_rows_are_dense_calls_and_a_run_of_short_ones_is_one_packed_call() -> None:
    rule = DenseRule(replace(PACKS, dense_from=2048, dense_at_once_from=2048))
    found = stretches([32768, 4096, 4096, 1000, 700, 700, 3], rule)
    assert found == [(1, True), (2, True), (4, False)]
    assert stretches([1024] * 16, rule) == [(16, True)]
    assert stretches([9, 9, 3], DenseRule(KERNELS["dense"])) == [(2, True), (1, True)]


def test_a_shape_that_is_dear_to_prepare_for_is_a_dense_call_only_once_it_comes_again() -> None:
    rule = DenseRule(replace(PACKS, dense_from=2048, dense_at_once_from=16384))
    assert stretches([16384, 5000, 4096, 4096], rule) == [(1, True), (3, False)]
    assert stretches([16384, 5001, 4096, 4096], rule) == [(1, True), (1, False), (2, True)]
    for length in range(6000, 6000 + REMEMBERED):
        assert stretches([length], rule) == [(1, False)]
    assert stretches([4096, 4096], rule) == [(2, False)]


@pytest.mark.parametrize("kernel", [FlashAttention(), CudnnAttention()])
def test_this_torch_has_the_gpu_ops_as_they_are_called_and_leaves_heads_where_a_merge_wants_them(
    kernel: DenseAttention,
) -> None:
    # The meta device checks arguments and gives shapes and strides; numbers are checked on a GPU.
    def empty(tokens: int, heads: int) -> torch.Tensor:
        return torch.empty(2, tokens, heads, 64, dtype=torch.bfloat16, device="meta")

    for causal, queries, keys in ((True, 64, 64), (False, 32, 64)):
        q, (k, v) = empty(queries, 4), empty(keys, 4).chunk(2, 2)
        attended = kernel.forward(q, k, v, causal=causal, scale=0.1)
        grads = kernel.backward(q, q, k, v, attended, causal=causal, scale=0.1)
        assert attended.out.stride() == q.stride()
        assert attended.lse.shape == (2, 4, queries)
        assert [one.shape for one in grads] == [q.shape, k.shape, v.shape]


def test_this_torch_has_the_packed_gpu_op_as_it_is_called() -> None:
    q = torch.empty(64, 4, 64, dtype=torch.bfloat16, device="meta")
    k, v = torch.empty(80, 4, 64, dtype=torch.bfloat16, device="meta").chunk(2, 1)
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    bounds = PackedBounds(queries=ends, keys=ends, most_queries=40, most_keys=50)
    attended = FlashPackedAttention().forward(q, k, v, bounds, scale=0.1)
    grads = FlashPackedAttention().backward(q, q, k, v, attended, bounds, scale=0.1)
    assert attended.lse.shape == (4, 64)
    assert [one.shape for one in grads] == [q.shape, k.shape, v.shape]
