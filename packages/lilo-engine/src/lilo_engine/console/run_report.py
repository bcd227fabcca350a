"""Run report: where a run's time went, as plain numbers; made from its totals, printed by `lilo report`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lilo_engine.console.run_totals import RunTotals

_TRAINING = ("forward_backward", "forward", "optim_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run."""

    run_id: str
    wall_s: float
    """From its first command to the end of its newest."""
    train_s: float
    """Of that, passes and steps; of shared commands its share by tokens."""
    other_s: float
    """The rest: it waited, its client sampled or thought, or it was saved."""
    assemble_share: float
    """Of the wall time: captures, which hold the device."""
    publish_share: float
    """Of the wall time: saves being made durable, which overlap training."""
    steps: int
    passes: int
    tokens: int
    tokens_per_device_s: float
    """Tokens of passes by seconds of training and device."""
    datums: int
    mean_tokens: float
    """Mean length of a datum."""
    longest_tokens: int
    truncated_share: float
    """Datums that fill the context."""
    lengths: dict[str, int]
    """`128-255` -> datums of such a length."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run_report(run_id: str, totals: RunTotals, *, num_devices: int) -> RunReport:
    """Make the report of a run."""
    wall_s = 0.0 if totals.first_s is None else totals.last_s - totals.first_s
    train_s = sum(totals.seconds.get(command, 0.0) for command in _TRAINING)
    lengths = totals.lengths
    return RunReport(
        run_id=run_id,
        wall_s=wall_s,
        train_s=train_s,
        other_s=max(0.0, wall_s - train_s),
        assemble_share=_share(totals.seconds.get("capture", 0.0), wall_s),
        publish_share=_share(totals.seconds.get("persist", 0.0), wall_s),
        steps=totals.commands.get("optim_step", 0),
        passes=totals.commands.get("forward_backward", 0) + totals.commands.get("forward", 0),
        tokens=totals.tokens,
        tokens_per_device_s=_share(totals.tokens, train_s * num_devices),
        datums=lengths.count,
        mean_tokens=_share(lengths.total, lengths.count),
        longest_tokens=lengths.longest,
        truncated_share=_share(lengths.truncated, lengths.count),
        lengths={
            f"{2 ** (bits - 1) if bits else 0}-{2**bits - 1}": count
            for bits, count in sorted(lengths.powers.items())
        },
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
