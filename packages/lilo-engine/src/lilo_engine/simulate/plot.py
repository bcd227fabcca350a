"""Plot: a simulation as an SVG picture, written by hand so that no plotting library is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from lilo_engine.simulate.trace import Figures, Trace

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 400, 240, 70, 60, 90
_COLOURS = ("#1f6f8b", "#99582a", "#5b8e55")
_POINTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    """Shares, 0 to 1."""


def svg(trace: Trace, figures: Figures) -> str:
    """Progress of the slowest, median and fastest client over time, and how long operations waited."""
    work = trace.work_tokens
    times = [look.time_s for look in trace.looks]
    progress = [
        _Curve(name="fastest client", x=times, y=[look.most / work for look in trace.looks]),
        _Curve(name="median", x=times, y=[look.median / work for look in trace.looks]),
        _Curve(name="slowest client", x=times, y=[look.least / work for look in trace.looks]),
    ]
    shares = np.linspace(0, 1, _POINTS)
    waits = [
        _Curve(name=kind, x=[float(v) for v in np.quantile(values, shares)], y=list(shares))
        for kind, values in sorted(trace.waits_s.items())
    ]
    words = (
        f"{figures.clients:,} clients, {figures.operations:,} operations in {figures.plans:,} plans: "
        f"{_fairness(figures)}, passed over at most {figures.bypass} times"
    )
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
            f'viewBox="0 0 {2 * (_WIDTH + _GAP) + _LEFT} {_HEIGHT + 2 * _TOP}">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_LEFT}" y="24" font-size="14">{escape(words)}</text>',
            *_panel(_LEFT, "share of the work done", "seconds", progress),
            *_panel(_LEFT + _WIDTH + _GAP, "share that waited at most", "seconds waited", waits),
            "</svg>\n",
        ]
    )


def _fairness(figures: Figures) -> str:
    parts: list[str] = []
    if figures.progress_ratio is not None:
        parts.append(f"progress ratio {figures.progress_ratio:.2f}")
    if figures.fill is not None:
        parts.append(f"batches {100 * figures.fill:.1f} % full")
    return ", ".join(parts) or "never more work than fits"


def _panel(left: int, title: str, axis: str, curves: Sequence[_Curve]) -> list[str]:
    most = max((max(curve.x) for curve in curves if curve.x), default=1.0) or 1.0
    bottom = _TOP + _HEIGHT

    def place(x: float, y: float) -> str:
        return f"{left + _WIDTH * x / most:.1f},{bottom - _HEIGHT * y:.1f}"

    lines = [
        f'<text x="{left}" y="{_TOP - 10}">{escape(title)}</text>',
        f'<text x="{left + _WIDTH}" y="{bottom + 36}" text-anchor="end">{escape(axis)}</text>',
        f'<path d="M{left},{_TOP} V{bottom} H{left + _WIDTH}" fill="none" stroke="black"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = bottom - _HEIGHT * share
        lines.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:g}</text>')
        x = left + _WIDTH * share
        lines.append(
            f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{most * share:,.0f}</text>'
        )
    for index, curve in enumerate(curves):
        lines += _curve(curve, _COLOURS[index % len(_COLOURS)], place, left, index)
    return lines


def _curve(
    curve: _Curve, colour: str, place: Callable[[float, float], str], left: int, index: int
) -> list[str]:
    points = " ".join(place(x, y) for x, y in zip(curve.x, curve.y, strict=True))
    y = _TOP + _HEIGHT - 16 * (index + 1)
    return [
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
        f'<text x="{left + _WIDTH - 6}" y="{y}" text-anchor="end" fill="{colour}">{escape(curve.name)}</text>',
    ]
