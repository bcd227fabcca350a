"""Plot: tokens a second and peak memory over the length of a row, one line a setting, as an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lilo_engine.errors import InvalidRequest

from lilo_miles_backend.bench.point import Point

_PANELS = (("tok_s", "tokens a second and GPU"), ("peak_gib", "peak memory, GiB"))


def write_plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw what was measured; settings that ran out of memory end where they last fitted.

    Raises:
        InvalidRequest: matplotlib is not installed.
    """
    try:
        # Only who asks for a plot needs it.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise InvalidRequest(
            "a plot needs matplotlib: pip install 'lilo-miles-backend[bench]'"
        ) from error
    figure: Any = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    settings = list(dict.fromkeys(point["setting"] for point in points if "tok_s" in point))
    for place, (name, label) in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(1, len(_PANELS), place)
        for setting in settings:
            mine = sorted(
                (point["tokens"], point[name])
                for point in points
                if point["setting"] == setting and name in point
            )
            style = "-o" if setting.startswith("ours") else "--s"
            axes.plot(*zip(*mine, strict=True), style, label=setting)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of the row")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path)
