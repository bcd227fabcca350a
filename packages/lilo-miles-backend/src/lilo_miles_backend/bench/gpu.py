"""GPU bench: speed and memory over the length of a row: our trainer and Hugging Face + PEFT, one after another.

Every setting is measured in a process of its own (`point.py`), so that none inherits another's memory or replaced classes.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from lilo_miles_backend.bench.point import Point
from lilo_miles_backend.bench.random_model import roomy

_log = logging.getLogger(__name__)

SETTINGS = ("ours:all", "ours:input", "peer", "liger")
"""Ours with everything kept and with inputs alone; both peers try with and without checkpointing."""
LENGTHS = (4096, 16_384, 65_536)
LIMIT_S = 900.0
"""For one setting."""
LEAST_FREE = 24 << 30
"""Bytes that 8 layers of an 8B model may take while they are written."""


def measure(
    model: str,
    layers: int,
    lengths: Sequence[int],
    settings: Sequence[str] = SETTINGS,
    *,
    device: str = "cuda",
    told: Callable[[Point], None] = lambda _: None,
) -> list[Point]:
    """Measure every setting at every length.

    Args:
        model: of `random_model.SHAPES`.
        layers: of its layers, how many.
        lengths: tokens of the one row of a step.
        settings: of `SETTINGS`.
        device: `cuda`, or `cpu` for trying it out.
        told: is called with each point when it is there.

    Returns:
        All points; a setting that failed as a whole is one point with `error`.
    """
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="lilo-bench-", dir=roomy(LEAST_FREE)) as root:
        for setting in settings:
            command = [sys.executable, "-P", "-m", "lilo_miles_backend.bench.point", setting]
            command += ["--root", root, "--model", model, "--layers", str(layers)]
            command += ["--device", device, "--lengths", *map(str, lengths)]
            for point in _points(setting, command):
                told(point)
                points.append(point)
    return points


def _points(setting: str, command: list[str]) -> list[Point]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return [{"setting": setting, "error": f"it took over {LIMIT_S:.0f} s"}]
    points: list[Point] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    if done.returncode:
        _log.error("%s ended with %d: %s", setting, done.returncode, done.stderr[-2000:])
        last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        points.append({"setting": setting, "error": last[:300]})
    return points
