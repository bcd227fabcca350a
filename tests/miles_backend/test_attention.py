"""Attention over streams: every way to put it together, in float64, against torch's autograd through a dense mask."""

from __future__ import annotations

import math
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lilo_miles_backend.ranks.attention import Attention, PackedRows
from lilo_miles_backend.ranks.collectives import Axis
from lilo_miles_backend.ranks.kernels.attention_choice import (
    choose_attention,
)
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    AttentionKernels,
)
from lilo_miles_backend.ranks.kernels.attention_merge import merge_
from lilo_miles_backend.ranks.kernels.attention_reference import (
    CpuAttention,
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
