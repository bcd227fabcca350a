"""Table: what was measured and which bounds hold, short enough to be read at the end of a log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SHOWN = ("tokens", "tok_s", "peak_gib", "useful_share")
_HIDDEN = ("case", "setting", "seconds", "keep", "tok_s_median", "useful_tflops", *_SHOWN)


def figures_table(lines: Sequence[dict[str, Any]]) -> str:
    """One row a measurement: speeds in columns, the rest as it stands."""
    rows: list[tuple[str, ...]] = [("case", "setting", "tokens", "tok/s", "GiB", "useful", "")]
    for line in lines:
        if "figure" in line:
            continue
        rest = ", ".join(f"{k} {_text(v)}" for k, v in line.items() if k not in _HIDDEN)
        shown = (_text(line.get(name, "")) for name in _SHOWN)
        rows.append((line["case"], line.get("setting", ""), *shown, rest[:160]))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join(
        " ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[6]]
        ).rstrip()
        for row in rows
    )


def bounds_table(lines: Sequence[dict[str, Any]]) -> str:
    """One row a bound; those that do not hold come first."""
    bounds = sorted((line for line in lines if "figure" in line), key=lambda line: line["pass"])
    return "\n".join(
        f"{'good' if line['pass'] else 'MISS'}  {line['case']}: {line['figure']}: "
        f"{_text(line['measured'])} ({line['required']})"
        for line in bounds
    )


def _text(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )
