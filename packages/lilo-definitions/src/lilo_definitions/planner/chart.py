"""A plan as an SVG picture: one stacked bar per rank, the limit as a line, a legend with the numbers."""

from __future__ import annotations

from html import escape

from lilo_definitions.planner.plan import Plan

PART_COLOURS = {
    "weights": "#4269d0",
    "adapters": "#efb118",
    "optimizer": "#ff725c",
    "gradients": "#6cc5b0",
    "kept": "#3ca951",
    "kv_gather": "#a463f2",
    "logits": "#ff8ab7",
    "working": "#97bbf5",
}
"""One colour per part of `Memory`, told apart also by readers who confuse red and green."""

PART_WORDS = {
    "weights": "frozen weights",
    "adapters": "adapters",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "kept": "kept activations",
    "kv_gather": "gathered K and V",
    "logits": "logits",
    "working": "layer at work",
}
"""What a reader is told of each part."""

_MOST_BARS = 32
"""More ranks than this are drawn as this many; they are alike."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _LEGEND = 720.0, 260.0, 56.0, 48.0, 190.0


def svg(plan: Plan) -> str:
    """The picture, as the text of an SVG file."""
    bars = min(plan.job.world_size, _MOST_BARS)
    highest = max(plan.memory.peak, plan.limit_bytes or 0.0) * 1.05
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{_TOP + _HEIGHT + 44:g}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{_LEFT:g}" y="20" font-size="14">{escape(_title(plan))}</text>',
        *_axis(highest),
        *(line for rank in range(bars) for line in _bar(plan, rank, bars, highest)),
        *_limit(plan, highest),
        *_legend(plan),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(plan: Plan) -> str:
    job = plan.job
    layout = f"tp {job.tp} x cp {job.cp} x dp {job.dp}"
    return f"{job.name}, {job.context:,} tokens, {layout}: {plan.memory.peak / 1e9:.1f} GB per rank"


def _y(value: float, highest: float) -> float:
    return _TOP + _HEIGHT * (1 - value / highest)


def _axis(highest: float) -> list[str]:
    right = _WIDTH - _LEGEND
    lines: list[str] = []
    for step in range(5):
        value = highest * step / 4
        y = _y(value, highest)
        lines.append(
            f'<line x1="{_LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        lines.append(
            f'<text x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{value / 1e9:.3g} GB</text>'
        )
    lines.append(
        f'<text x="{(_LEFT + right) / 2:g}" y="{_TOP + _HEIGHT + 34:g}" text-anchor="middle">rank</text>'
    )
    return lines


def _bar(plan: Plan, rank: int, bars: int, highest: float) -> list[str]:
    slot = (_WIDTH - _LEGEND - _LEFT) / bars
    x, width = _LEFT + slot * (rank + 0.1), slot * 0.8
    lines: list[str] = []
    below = 0.0
    for part, value in plan.memory.parts().items():
        top, bottom = _y(below + value, highest), _y(below, highest)
        below += value
        if value:
            lines.append(
                f'<rect x="{x:.1f}" y="{top:.2f}" width="{width:.1f}" height="{bottom - top:.2f}" '
                f'fill="{PART_COLOURS[part]}"/>'
            )
    middle, foot = x + width / 2, _TOP + _HEIGHT + 16
    lines.append(f'<text x="{middle:.1f}" y="{foot:g}" text-anchor="middle">{rank}</text>')
    return lines


def _limit(plan: Plan, highest: float) -> list[str]:
    if plan.limit_bytes is None:
        return []
    y, right = _y(plan.limit_bytes, highest), _WIDTH - _LEGEND
    return [
        f'<line x1="{_LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c00" stroke-dasharray="5 3"/>',
        f'<text x="{right - 4:g}" y="{y - 4:.1f}" text-anchor="end" fill="#c00">'
        f"limit {plan.limit_bytes / 1e9:.1f} GB</text>",
    ]


def _legend(plan: Plan) -> list[str]:
    x = _WIDTH - _LEGEND + 14
    lines: list[str] = []
    for index, (part, value) in enumerate(reversed(plan.memory.parts().items())):
        y = _TOP + 12 + index * 20
        words = f"{PART_WORDS[part]} {value / 1e9:.2f}"
        lines.append(
            f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" fill="{PART_COLOURS[part]}"/>'
        )
        lines.append(f'<text x="{x + 18:g}" y="{y:g}">{escape(words)}</text>')
    return lines
