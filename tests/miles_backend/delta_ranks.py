"""Gated delta nets over real context-parallel ranks: each computes its part of one stream, and the parent puts it together.

Shared by the tests here and by `proofs/families.py`, which break it on purpose: what a fault does is seen by the same
comparison as what is right.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from lilo_miles_backend.families.shape import DeltaShape
from lilo_miles_backend.ranks.attention import PackedRows
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.ranks.kernels.delta_reference import TorchDelta
from lilo_miles_backend.ranks.layers.delta import DeltaMixer
from lilo_miles_backend.ranks.stream import pack

Fault: TypeAlias = Literal["order", "leak", "maps", "halo"]
"""Chunks taken in ranks' order; rows not kept apart; states, or the convolution's tokens, not passed between ranks."""

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=8, conv_kernel=4)
EPS = 1e-6
LIMIT_S = 60.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["lilo_miles_backend.ranks.rank"])


@dataclass(frozen=True)
class Case:
    """One stream: its rows, the projection of every token and the gradient of every output; float64."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    weights: dict[str, torch.Tensor]
    projected: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], multiple: int = 1) -> Case:
        """Random numbers whose state is remembered over tens of tokens: A is between 0.02 and 0.6."""
        generator = torch.Generator().manual_seed(1)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        padded = tuple(-(-length // multiple) * multiple for length in lengths)
        heads = SHAPE.value_heads
        a = torch.empty(heads, dtype=torch.float64).uniform_(0.02, 0.6, generator=generator)
        weights = {
            "conv": normal(SHAPE.conv_channels, SHAPE.conv_kernel),
            "a_log": a.log(),
            "dt_bias": normal(heads) - 1,
            "norm": normal(SHAPE.value_dim),
        }
        features = SHAPE.conv_channels + SHAPE.value_width + 2 * heads
        return cls(
            lengths=lengths,
            padded=padded,
            weights=weights,
            projected=normal(sum(padded), features),
            grad=normal(sum(padded), SHAPE.value_width),
        )


def token_by_token(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and gradient of the projection by the definition, row by row and token by token."""
    projected = case.projected.clone().requires_grad_()
    out = torch.cat([_row(part, case.weights) for part in projected.split(case.padded)])
    out.backward(case.grad)
    assert projected.grad is not None
    return out.detach(), projected.grad


def over_ranks(case: Case, cp: int, fault: Fault | None = None) -> tuple[torch.Tensor, ...]:
    """The same from `cp` processes that talk over gloo; one that is right is this process."""
    if cp == 1 and fault is None:
        parts = [_part(case, ALONE, None)]
    else:
        with tempfile.TemporaryDirectory(prefix="lilo-meet-") as folder:
            pipes, processes = [], []
            for rank in range(cp):
                ours, theirs = _context.Pipe()
                arguments = (theirs, case, rank, cp, f"file://{folder}/meet", fault)
                process = _context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            assert all(pipe.poll(LIMIT_S) for pipe in pipes), f"no answer within {LIMIT_S} s"
            parts = [pipe.recv() for pipe in pipes]
            for process in processes:
                process.join(LIMIT_S)
    wholes = torch.empty_like(case.grad), torch.empty_like(case.projected)
    for rank, part in enumerate(parts):
        places = torch.from_numpy(pack(case.lengths, case.padded, rank, cp).places)
        for whole, values in zip(wholes, part, strict=True):
            whole[places] = torch.as_tensor(values)
    return wholes


def _serve(pipe: Any, case: Case, rank: int, cp: int, meet: str, fault: Fault | None) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=cp)
    group = dist.group.WORLD
    part = _part(case, Axis(name="cp", rank=rank, size=cp, group=group), fault)
    # As arrays: tensors travel as open files, which this process's end would take along.
    pipe.send([tensor.numpy() for tensor in part])
    dist.barrier()
    dist.destroy_process_group()


def _part(case: Case, cp: Axis, fault: Fault | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's outputs and gradients."""
    stream = pack(case.lengths, case.padded, cp.rank, cp.size)
    rows = PackedRows.of(stream, torch.device("cpu"))
    mixer = DeltaMixer(shape=SHAPE, kernels=TorchDelta(), eps=EPS, dtype=torch.float64, cp=cp)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.copy_(case.weights[name])
    if fault is not None:
        break_on_purpose(fault)
    places = torch.from_numpy(stream.places)
    projected = case.projected[places]
    out, saved = mixer.forward(projected, rows)
    return out, mixer.backward(case.grad[places], projected, out, saved, rows)


def break_on_purpose(fault: Fault) -> None:
    """Make every delta net of this process wrong; meant for processes that end afterwards."""
    from lilo_miles_backend.ranks.layers import delta

    if fault == "order":
        delta.chunk_place = lambda chunk, cp_size: divmod(chunk, 2)
    elif fault == "leak":
        lengths = delta.interval_lengths
        delta.interval_lengths = lambda padded, cp: _as_one(lengths(padded, cp))
    elif fault == "maps":
        enter = delta.DeltaMixer._enter
        delta.DeltaMixer._enter = lambda *args, **kwargs: 0 * enter(*args, **kwargs)
    else:
        before = delta.DeltaMixer._before
        delta.DeltaMixer._before = lambda *args: 0 * before(*args)


def _as_one(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """All rows as one."""
    return (sum(lengths),)


def _row(projected: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    keys, values, heads = SHAPE.key_width, SHAPE.value_width, SHAPE.value_heads
    qkv, z, b, a = projected.split((2 * keys + values, values, heads, heads), -1)
    width = SHAPE.conv_kernel
    padded = F.pad(qkv, (0, 0, width - 1, 0))
    y = torch.zeros_like(qkv)
    for tap in range(width):
        y = y + padded[tap : tap + len(qkv)] * weights["conv"][:, tap]
    q, k, v = F.silu(y).split((keys, keys, values), -1)
    q, k = (_unit(t.unflatten(-1, (-1, SHAPE.key_dim))) for t in (q, k))
    shared = heads // SHAPE.key_heads
    q, k = (t.repeat_interleave(shared, 1) for t in (q * SHAPE.key_dim**-0.5, k))
    v = v.unflatten(-1, (heads, -1))
    decay = (-weights["a_log"].exp() * F.softplus(a + weights["dt_bias"])).exp()
    state = projected.new_zeros(heads, SHAPE.key_dim, SHAPE.value_dim)
    outs = []
    for t in range(len(projected)):
        state = state * decay[t][:, None, None]
        error = v[t] - (k[t][:, :, None] * state).sum(1)
        state = state + k[t][:, :, None] * (b[t].sigmoid()[:, None] * error)[:, None]
        outs.append((q[t][:, :, None] * state).sum(1))
    out = torch.stack(outs)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + EPS) * weights["norm"]
    return (out * F.silu(z.unflatten(-1, (heads, -1)))).flatten(1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
