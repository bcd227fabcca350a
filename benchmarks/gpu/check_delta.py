"""Gated delta nets on the device: against the torch form in float64, packed, over emulated ranks; then how long they take.

At the head size of the Qwen3.5 family (128). Timed are the heads of one of two tensor-parallel ranks of the 27B model (8
key and 24 value heads), 32k tokens, which is a rank's share of 256k over eight context-parallel ranks, and 128k.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from lilo_miles_backend.bench.clock import timed
from lilo_miles_backend.families.shape import DeltaShape
from lilo_miles_backend.ranks.attention import PackedRows
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.ranks.kernels.delta import delta_kernels
from lilo_miles_backend.ranks.kernels.delta_kernels import DeltaKernels
from lilo_miles_backend.ranks.kernels.delta_reference import TorchDelta
from lilo_miles_backend.ranks.layers import delta
from lilo_miles_backend.ranks.layers.delta import DeltaMixer
from lilo_miles_backend.ranks.stream import pack

from benchmarks.gpu.lines import at_most, bound, emit, part

CASE = "check_delta"
EPS = 1e-6
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 3e-3}
"""Norm of the difference over that of the float64 result. In float32 the kernels multiply in TF32."""


@dataclass(frozen=True)
class Sizes:
    """Of what is checked, and of what is timed."""

    checked: DeltaShape
    lengths: tuple[int, ...]
    """Rows of the comparisons: over chunks of 64, one below and above them, single tokens."""
    timed: DeltaShape
    tokens: tuple[int, ...]


def _shape(key_heads: int, value_heads: int, dim: int) -> DeltaShape:
    return DeltaShape(
        key_heads=key_heads, value_heads=value_heads, key_dim=dim, value_dim=dim, conv_kernel=4
    )


REAL = Sizes(
    checked=_shape(8, 24, 128),  # other numbers of heads would compile everything again
    lengths=(1000, 1, 63, 64, 65, 2, 500, 129),
    timed=_shape(8, 24, 128),
    tokens=(32_768, 131_072),
)
SMALL = Sizes(
    checked=_shape(1, 3, 16), lengths=(70, 1, 3, 33), timed=_shape(1, 3, 16), tokens=(256,)
)


def main() -> None:
    """All parts; each fails for itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    sizes = REAL if device.type == "cuda" else SMALL
    started = time.monotonic()
    kernels = delta_kernels(device)

    def at(what: str) -> AbstractContextManager[None]:
        emit(CASE, begins=what, seconds=time.monotonic() - started)
        return part(CASE, what)

    if device.type == "cuda":
        # Imported here, since it imports Triton.
        from lilo_miles_backend.ranks.kernels import delta_choice, triton_delta
        from lilo_miles_backend.ranks.kernels.delta_pieces import TritonPieces

        own = delta_choice.chunk_gradients(device) is triton_delta.chunk_gradients
        own &= isinstance(delta_choice.pieces(device), TritonPieces)
        bound(CASE, "our own kernels are right at start, and run", own, "true", own)
    bfloat16, float32 = LIMITS
    with at("against float64, bfloat16"):
        against_float64(kernels, sizes, bfloat16, device)
    with at("neighbours"):
        neighbours(kernels, sizes, device)
    with at("over 2 ranks, bfloat16"):
        over_ranks(kernels, sizes, bfloat16, device, 2)
    for tokens in sizes.tokens:
        for cp in (1, 2):
            with at(f"{tokens} tokens, maps: {cp > 1}"):
                time_one(kernels, sizes, tokens, cp, device)
    with at("over 4 ranks, bfloat16"):
        over_ranks(kernels, sizes, bfloat16, device, 4)
    if device.type != "cuda":  # which would compile everything again
        with at("against float64, float32"):
            against_float64(kernels, sizes, float32, device)
    emit(CASE, setting="all", seconds=time.monotonic() - started)


def against_float64(
    kernels: DeltaKernels, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> None:
    """Values and the gradient of the projection, packed rows."""
    limit = LIMITS[dtype]
    values = Values.of(sizes.checked, sizes.lengths, device)
    out, grad = values.run(kernels, dtype)
    out64, grad64 = values.run(TorchDelta(), torch.float64, of=dtype)
    at_most(CASE, f"fla against float64, output, {dtype}", _error(out, out64), limit)
    at_most(CASE, f"fla against float64, gradient, {dtype}", _error(grad, grad64), limit)
    plain, plain_grad = values.run(TorchDelta(), dtype)
    emit(
        CASE,
        setting=f"the torch form in {dtype} against float64",
        output=_error(plain, out64),
        gradient=_error(plain_grad, grad64),
    )


def over_ranks(
    kernels: DeltaKernels, sizes: Sizes, dtype: torch.dtype, device: torch.device, cp: int
) -> None:
    """Ranks as threads: maps, halo and the way back of both."""
    limit = LIMITS[dtype]
    padded = tuple(-(-length // (2 * cp)) * 2 * cp for length in sizes.lengths)
    values = Values.of(sizes.checked, padded, device)
    out64, grad64 = values.run(TorchDelta(), torch.float64, of=dtype)
    out, grad = values.run_over(kernels, dtype, cp)
    at_most(CASE, f"over {cp} ranks, output, {dtype}", _error(out, out64), limit)
    at_most(CASE, f"over {cp} ranks, gradient, {dtype}", _error(grad, grad64), limit)


def neighbours(kernels: DeltaKernels, sizes: Sizes, device: torch.device) -> None:
    """A row's numbers are the same bits whatever is in the row before it."""
    values = Values.of(sizes.checked, sizes.lengths, device)
    first = sizes.lengths[0]
    results = []
    for _ in range(2):
        out, grad = values.run(kernels, torch.bfloat16)
        results.append((out[first:], grad[first:]))
        values.projected[:first].normal_()
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    bound(CASE, "rows keep their bits when a neighbour changes", same, "true", same)


def time_one(
    kernels: DeltaKernels, sizes: Sizes, tokens: int, cp: int, device: torch.device
) -> None:
    """Forward, and backward with its recomputation; with maps, all but the exchange itself."""
    shape = sizes.timed
    axis = ALONE if cp == 1 else Axis(name="cp", rank=0, size=cp, group=None)
    mixer = make_mixer(shape, kernels, torch.bfloat16, device, axis)
    rows = PackedRows.of(pack((tokens * cp,), (tokens * cp,), 0, cp), device)
    features = sum(mixer._columns)
    projected = torch.randn(tokens, features, device=device).bfloat16()
    grad = torch.randn(tokens, shape.value_width, device=device).bfloat16()
    with alike():
        out, saved = mixer.forward(projected, rows)
        forward = timed(lambda: mixer.forward(projected, rows), warm=2, runs=5)
        backward = timed(lambda: mixer.backward(grad, projected, out, saved, rows), warm=2, runs=5)
    emit(
        CASE,
        setting=f"{tokens} tokens, {shape.key_heads}/{shape.value_heads} heads, maps: {cp > 1}",
        forward_ms=1e3 * forward.median_s,
        backward_ms=1e3 * backward.median_s,
        forward_gib=forward.peak_gib,
        backward_gib=backward.peak_gib,
    )


@dataclass(frozen=True)
class Values:
    """One stream in float32, and small weights whose state is remembered over tens of tokens."""

    shape: DeltaShape
    lengths: tuple[int, ...]
    weights: dict[str, torch.Tensor]
    projected: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def of(cls, shape: DeltaShape, lengths: tuple[int, ...], device: torch.device) -> Values:
        """Random ones."""
        torch.manual_seed(1)
        heads = shape.value_heads
        features = shape.conv_channels + shape.value_width + 2 * heads
        return cls(
            shape=shape,
            lengths=lengths,
            weights=_weights(shape, device),
            projected=torch.randn(sum(lengths), features, device=device),
            grad=torch.randn(sum(lengths), shape.value_width, device=device),
        )

    def run(
        self, kernels: DeltaKernels, dtype: torch.dtype, of: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and gradient of the projection, of inputs that were rounded to `of`."""
        mixer = self._mixer(kernels, dtype, of or dtype)
        rows = PackedRows.of(pack(self.lengths, self.lengths, 0, 1), self.projected.device)
        projected, grad = (t.to(of or dtype).to(dtype) for t in (self.projected, self.grad))
        out, saved = mixer.forward(projected, rows)
        return out, mixer.backward(grad, projected, out, saved, rows)

    def run_over(
        self, kernels: DeltaKernels, dtype: torch.dtype, cp: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, cut over ranks that are threads."""
        device = self.projected.device
        projected, grad = self.projected.to(dtype), self.grad.to(dtype)
        wholes = torch.full_like(grad, torch.nan), torch.full_like(projected, torch.nan)
        turn = (
            threading.Lock()
        )  # kernels are compiled on first use, which is not made for two threads

        def one(rank: int) -> None:
            axis = Axis(name="cp", rank=rank, size=cp, group=None)
            mixer = self._mixer(kernels, dtype, dtype, axis)
            stream = pack(self.lengths, self.lengths, rank, cp)
            rows = PackedRows.of(stream, device)
            places = torch.from_numpy(stream.places).to(device)
            with turn:
                out, saved = mixer.forward(projected[places], rows)
                wholes[0][places] = out
                wholes[1][places] = mixer.backward(
                    grad[places], projected[places], out, saved, rows
                )

        with _together(cp, turn):
            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(cp)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return wholes

    def _mixer(
        self, kernels: DeltaKernels, dtype: torch.dtype, of: torch.dtype, cp: Axis = ALONE
    ) -> DeltaMixer:
        mixer = make_mixer(self.shape, kernels, dtype, self.projected.device, cp)
        with torch.no_grad():
            for name, parameter in mixer.named_parameters():
                rounded = self.weights[name].to(of) if name == "conv" else self.weights[name]
                parameter.copy_(rounded)
        return mixer


class _Summed:
    """What `summing_parts` returns."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        """It is there."""
        return self._result


@contextmanager
def _together(cp: int, turn: threading.Lock) -> Iterator[None]:
    """In place of a process group: threads that meet at every exchange.

    One of them runs at a time: that which has the `turn`.
    """
    slots: list[torch.Tensor | None] = [None] * cp
    barrier = threading.Barrier(cp, timeout=90)

    def every(x: torch.Tensor, axis: Axis) -> torch.Tensor:
        slots[axis.rank] = x
        turn.release()
        try:
            barrier.wait()
            found = torch.stack([slot for slot in slots if slot is not None])
            barrier.wait()
        finally:
            turn.acquire()
        return found

    def summed(x: torch.Tensor, axis: Axis) -> _Summed:
        return _Summed(every(x, axis)[:, axis.rank].sum(0))

    with patch.object(delta, "stacked", every), patch.object(delta, "summing_parts", summed):
        yield


@contextmanager
def alike() -> Iterator[None]:
    """In place of a process group: every rank has told the same as this one."""

    def every(x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return x.expand(axis.size, *x.shape).contiguous()

    def summed(x: torch.Tensor, axis: Axis) -> _Summed:
        return _Summed(x[axis.rank].clone())

    with patch.object(delta, "stacked", every), patch.object(delta, "summing_parts", summed):
        yield


def make_mixer(
    shape: DeltaShape,
    kernels: DeltaKernels,
    dtype: torch.dtype,
    device: torch.device,
    cp: Axis = ALONE,
) -> DeltaMixer:
    with torch.device(device):
        mixer = DeltaMixer(shape=shape, kernels=kernels, eps=EPS, dtype=dtype, cp=cp)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.copy_(_weights(shape, device)[name]).requires_grad_(False)
    return mixer


def _weights(shape: DeltaShape, device: torch.device) -> dict[str, torch.Tensor]:
    heads = shape.value_heads
    return {
        "conv": torch.randn(shape.conv_channels, shape.conv_kernel, device=device) * 0.5,
        "a_log": torch.empty(heads, device=device).uniform_(0.02, 0.6).log(),
        "dt_bias": torch.randn(heads, device=device) - 1,
        "norm": torch.rand(shape.value_dim, device=device) + 0.5,
    }


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over that of the exact one."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


if __name__ == "__main__":
    main()
