"""Figures that were measured elsewhere and published, for comparing predictions with: reference data, not results of a run.

Slices of a model, trained with adapters of rank 32 on every linear, random data, one sequence a step, measured on one and two
NVIDIA H200 (torch 2.11, bfloat16, logits in chunks of 4,096, the embedding whole on each rank, the residual stream shared
out over tensor-parallel ranks). The 27B slices are one rank's share of TP2 x CP8 and TP1 x CP16. Rows of Lilo's own trainer
are what `benchmarks/gpu/` measured of it (logits in chunks of 1,024 and the embedding shared out). Not a proof.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lilo_definitions import ARCHITECTURES, GPUS, Architecture
from lilo_definitions.planner import Job
from lilo_definitions.trainer import Keep

K = 1024
_8B = replace(ARCHITECTURES["Qwen/Qwen3-8B"], layers=8)
_27B = Architecture(
    family="qwen3",
    layers=4,
    hidden=5120,
    inner=17_408,
    heads=24,
    kv_heads=4,
    head_dim=256,
    vocab=248_320,
    context=262_144,
    tied=False,
)

_MODELS = {
    "8B, 8 layers": _8B,
    "27B, 4 softmax layers": _27B,
    "8B": ARCHITECTURES["Qwen/Qwen3-8B"],
    "0.6B": ARCHITECTURES["Qwen/Qwen3-0.6B"],
}

PUBLISHED_PEAK_GB = 82.4
"""Most allocated on a rank, 27B at 250.4k tokens on 16 H200, TP2 x CP8, full recompute, whole logits."""
PUBLISHED_PASS_S = 17.4
PUBLISHED_PASS_TOKENS = 250_400
"""One forward and backward of the same run. Sets the rate of the miles profile."""
PUBLISHED_128K_STEP_S = 1658.0
PUBLISHED_128K_ROWS = 128
"""A step of the raw run at 128k on 8 H200, TP2 x CP4; that it has as many rows as the 256k run is an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured configuration."""

    slice: str
    tp: int
    cp: int
    context: int
    keep: Keep
    peak_gib: float
    tokens_per_s: float | None
    """Per GPU."""
    seen: bool
    """Whether the formulas or the rates were made looking at it; the others were predicted afterwards."""
    slots: int = 1
    own: bool = False
    """Whether it is of Lilo's trainer."""

    @property
    def job(self) -> Job:
        """What the planner is asked."""
        return Job(
            name=self.slice,
            architecture=_MODELS[self.slice],
            context=self.context,
            tokens_per_rank=self.context // self.cp,
            gpu=GPUS["H200"],
            tp=self.tp,
            cp=self.cp,
            keep=self.keep,
            slots=self.slots,
            logprob_chunk_tokens=1024 if self.own else 4096,
            shard_embedding=self.own,
        )

    @property
    def words(self) -> str:
        """For a figure's name."""
        more = f", {self.slots} adapters" if self.slots > 1 else ""
        more += ", Lilo's trainer" if self.own else ""
        return (
            f"{self.slice}, {self.context // K}k, TP{self.tp} x CP{self.cp}, {self.keep} kept{more}"
        )


def _row8(
    context: int,
    keep: Keep,
    tokens_per_s: float | None,
    peak_gib: float,
    *,
    tp: int = 1,
    cp: int = 1,
    seen: bool = False,
    slots: int = 1,
) -> Row:
    return Row(
        slice="8B, 8 layers",
        tp=tp,
        cp=cp,
        context=context,
        keep=keep,
        peak_gib=peak_gib,
        tokens_per_s=tokens_per_s,
        seen=seen,
        slots=slots,
    )


def _row27(keep: Keep, seconds: float, peak_gib: float, *, tp: int, cp: int, seen: bool) -> Row:
    return Row(
        slice="27B, 4 softmax layers",
        tp=tp,
        cp=cp,
        context=256 * K,
        keep=keep,
        peak_gib=peak_gib,
        tokens_per_s=256 * K / seconds / (tp * cp),
        seen=seen,
    )


def _own(name: str, context: int, tokens_per_s: float, peak_gib: float) -> Row:
    return Row(
        slice=name,
        tp=1,
        cp=1,
        context=context,
        keep="all",
        peak_gib=peak_gib,
        tokens_per_s=tokens_per_s,
        seen=False,
        own=True,
    )


ROWS = (
    _own("8B, 8 layers", 16 * K, 43_390, 17.29),
    _own("8B, 8 layers", 64 * K, 22_910, 49.74),
    _own("8B, 8 layers", 128 * K, 13_800, 93.84),
    _own("8B", 16 * K, 11_230, 65.24),
    _own("0.6B", 128 * K, 9_597, 103.1),
    _row8(4 * K, "input", 46_700, 9.4, seen=True),
    _row8(16 * K, "input", 36_200, 10.4),
    _row8(64 * K, "input", 19_400, 16.2, seen=True),
    _row8(4 * K, "attention", 47_000, 9.9),
    _row8(16 * K, "attention", 38_800, 12.4),
    _row8(64 * K, "attention", 22_600, 23.3, seen=True),
    _row8(4 * K, "qkv", 48_000, 10.3),
    _row8(16 * K, "qkv", 39_900, 13.9),
    _row8(64 * K, "qkv", 22_900, 28.6, seen=True),
    _row8(4 * K, "all", 56_000, 11.8, seen=True),
    _row8(16 * K, "all", 44_300, 19.9, seen=True),
    _row8(64 * K, "all", 24_400, 52.6, seen=True),
    _row8(128 * K, "all", 15_300, 96.2),
    _row8(16 * K, "qkv", None, 24.0, slots=32),
    _row8(4 * K, "all", 46_400, 8.7, cp=2, seen=True),
    _row8(16 * K, "all", 41_800, 14.5, cp=2, seen=True),
    _row8(64 * K, "all", 23_400, 30.8, cp=2, seen=True),
    _row8(128 * K, "all", 14_900, 52.6, cp=2),
    _row8(256 * K, "all", 8_690, 96.5, cp=2, seen=True),
    _row8(4 * K, "qkv", 44_500, 7.9, cp=2),
    _row8(16 * K, "qkv", 37_900, 11.5, cp=2),
    _row8(64 * K, "qkv", 22_000, 18.8, cp=2),
    _row8(128 * K, "qkv", 14_300, 30.0, cp=2),
    _row8(256 * K, "qkv", 8_450, 54.5, cp=2, seen=True),
    _row8(4 * K, "all", 45_500, 6.6, tp=2, seen=True),
    _row8(16 * K, "all", 40_200, 10.8, tp=2),
    _row8(64 * K, "all", 23_000, 27.7, tp=2),
    _row8(128 * K, "all", 14_800, 50.3, tp=2),
    _row8(256 * K, "all", 8_630, 95.4, tp=2),
    _row27("input", 2.44, 9.8, tp=2, cp=8, seen=True),
    _row27("qkv", 2.10, 11.8, tp=2, cp=8, seen=False),
    _row27("all", 2.06, 16.1, tp=2, cp=8, seen=True),
    _row27("input", 2.42, 14.5, tp=1, cp=16, seen=False),
    _row27("qkv", 2.08, 16.7, tp=1, cp=16, seen=False),
    _row27("all", 2.04, 21.0, tp=1, cp=16, seen=False),
)
"""Every configuration for which both a peak and, but for one, a speed were measured; none is left out."""
