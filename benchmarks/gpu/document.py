#!/usr/bin/env python3
"""Document: the tables of docs/gpu.md from the lines of one or more runs; of equal rows the last one counts.

python benchmarks/gpu/document.py FOLDER/lines.jsonl ...
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Line: TypeAlias = dict[str, Any]
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "gpu.md"

SECTIONS: Mapping[str, tuple[tuple[str, ...], tuple[tuple[str, str], ...]]] = {
    "slice": (
        ("slice", "peers"),
        (
            ("setting", "setting"),
            ("tokens", "tokens"),
            ("tok_s", "tokens/s"),
            ("peak_gib", "peak GiB"),
            ("useful_tflops", "useful TFLOP/s"),
            ("useful_share", "share"),
        ),
    ),
    "offload": (
        ("offload",),
        (
            ("setting", "setting"),
            ("tokens", "tokens"),
            ("tok_s", "tokens/s"),
            ("peak_gib", "peak GiB"),
        ),
    ),
    "whole": (
        ("whole",),
        (
            ("setting", "model"),
            ("tokens", "tokens"),
            ("tok_s", "tokens/s"),
            ("peak_gib", "peak GiB"),
            ("useful_share", "share"),
        ),
    ),
    "adapters": (
        ("adapters",),
        (
            ("setting", "16,384 tokens in 32 rows"),
            ("pass_s", "pass s"),
            ("step_s", "with all optimizers s"),
            ("peak_gib", "peak GiB"),
        ),
    ),
    "two": (
        ("two",),
        (
            ("setting", "layout"),
            ("tokens", "tokens"),
            ("tok_s", "tokens/s and GPU"),
            ("peak_gib", "peak GiB"),
            ("useful_share", "share"),
        ),
    ),
    "exactness": (
        ("step_exactness",),
        (("setting", "against float32"), ("ours", "ours"), ("hugging_face", "Hugging Face, bf16")),
    ),
    "serve": (
        ("serve",),
        (("setting", "8B, 4 rows of 4,096 tokens"), ("tok_s", "tokens/s"), ("step_s", "step s")),
    ),
    "hybrid": (
        ("hybrid",),
        (
            ("setting", "setting"),
            ("tokens", "tokens"),
            ("softmax_s", "softmax layer s"),
            ("softmax_gib", "GiB"),
            ("delta_s", "delta net s"),
            ("delta_gib", "GiB"),
            ("head_and_rest_s", "head and rest s"),
            ("step_s", "step s"),
            ("tokens_s_gpu", "tokens/s and GPU"),
            ("gib", "GiB in all"),
        ),
    ),
}
"""Of each marker of the page: the cases, and the columns with their titles."""

_WANTED = {
    "hybrid": ("a layer", "prediction"),
    "serve": ("bare", "SDK,"),
    "offload": (", inputs ",),
}
"""Of these cases only rows whose setting has one of these words."""


def main() -> None:
    """Fill in every section that the lines have something for."""
    lines = [
        json.loads(text)
        for name in sys.argv[1:]
        for text in Path(name).read_text("utf-8").splitlines()
    ]
    page = PAGE.read_text("utf-8")
    for section, (cases, columns) in SECTIONS.items():
        if rows := _rows(lines, cases, columns):
            page = _filled(page, section, _table(rows, columns))
    if bounds := _bounds(lines):
        page = _filled(page, "bounds", bounds)
    PAGE.write_text(page, "utf-8")


def _filled(page: str, section: str, table: str) -> str:
    marker = f"<!-- {section} -->"
    assert marker in page, f"docs/gpu.md has no {marker}"
    pattern = re.compile(rf"{re.escape(marker)}\n(?:\n?\|.*\n)*")
    return pattern.sub(lambda _: f"{marker}\n\n{table}", page)


def _rows(
    lines: Sequence[Line], cases: Sequence[str], columns: Sequence[tuple[str, str]]
) -> list[Line]:
    found: dict[tuple[str, Any], Line] = {}
    for case in cases:
        for line in lines:
            setting = str(line.get("setting", ""))
            words = _WANTED.get(case, ("",))
            if line["case"] != case or "figure" in line or not any(w in setting for w in words):
                continue
            if line.get("out_of_memory") or any(name in line for name, _ in columns[1:]):
                found[setting, line.get("tokens")] = line
    return list(found.values())


def _table(rows: Sequence[Line], columns: Sequence[tuple[str, str]]) -> str:
    head = [title for _, title in columns]
    body = [[_text(name, row) for name, _ in columns] for row in rows]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *body))


def _bounds(lines: Sequence[Line]) -> str:
    """Of what compares, not of the checks, whose figures are hundreds."""
    last = {
        (line["case"], line["figure"]): line
        for line in lines
        if "figure" in line and not line["case"].startswith("check_")
    }
    rows = [
        {
            "setting": figure,
            "measured": line["measured"],
            "required": line["required"],
            "holds": "yes" if line["pass"] else "**no**",
        }
        for (_, figure), line in last.items()
    ]
    columns = (
        ("setting", "figure"),
        ("measured", "measured"),
        ("required", "required"),
        ("holds", "holds"),
    )
    return _table(rows, columns) if rows else ""


def _text(name: str, row: Line) -> str:
    if name == "tok_s" and row.get("out_of_memory"):
        return "out of memory"
    value = row.get(name, "")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name == "useful_share":
            return f"{100 * value:.0f} %"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


if __name__ == "__main__":
    main()
