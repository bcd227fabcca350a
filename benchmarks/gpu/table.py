"""Table: what was measured and which bounds hold, short enough to be read at the end of a log. Pure."""

from __future__ import annotations

from collections import Counter
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


def bounds_table(lines: Sequence[dict[str, Any]], *, short: bool = False) -> str:
    """One row a bound, those that do not hold first.

    Args:
        lines: of all cases.
        short: of checks, which have a hundred, only count those that hold.
    """
    bounds = sorted((line for line in lines if "figure" in line), key=lambda line: line["pass"])
    counted = Counter(
        line["case"] for line in bounds if short and line["pass"] and "check_" in line["case"]
    )
    rows = [
        f"{'good' if line['pass'] else 'MISS'}  {line['case']}: {line['figure']}: "
        f"{_text(line['measured'])} ({line['required']})"
        for line in bounds
        if not (line["pass"] and line["case"] in counted)
    ]
    return "\n".join(
        [*rows, *(f"good  {case}: {number} figures" for case, number in counted.items())]
    )


def _text(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )
