"""The picture of a run: reward over steps, as a PNG. Needs matplotlib (extra `demo`); called by `lilo demo`."""

# matplotlib leaves **kwargs untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_reward(
    path: Path, *, rewards: Sequence[float], before: float, after: float, restart_after: int
) -> None:
    """Write the picture.

    Args:
        path: Where the PNG goes; an existing file is replaced.
        rewards: Mean training reward of each step, in [0, 1].
        before: Accuracy on the exam before the first step.
        after: The same after the last step.
        restart_after: Number of steps after which the server was stopped and started again.
    """
    figure = Figure(figsize=(8.0, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)  # no display is asked for
    axes = figure.add_subplot()
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, marker="o", markersize=3, label="reward of each step's answers")
    axes.plot([0, len(rewards)], [before, after], "s", color="black", label="256 exam questions")
    if 0 < restart_after < len(rewards):
        axes.axvline(restart_after + 0.5, linestyle="--", color="gray", label="server restarted")
    axes.set(xlabel="step", ylabel="share answered right", ylim=(0.0, 1.0), xlim=(-0.5, None))
    axes.set_title("Arithmetic by reinforcement learning, temperature 1")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    canvas.print_png(path)
