"""What a fresh interpreter of this environment finds: the torch build, its devices, and the installed plug-ins.

Run as `python -m lilo_engine.cli.probe` by `lilo doctor`, in a process of its own: importing torch takes seconds and
much memory, a broken CUDA driver may end the process, and this package does not depend on torch. Prints one JSON object.
"""

from __future__ import annotations

import importlib
import json
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUPS = ("lilo.backends", "lilo.samplers", "lilo.definitions", "lilo.commands")
"""Entry-point groups that Lilo reads."""


def torch_build() -> dict[str, Any]:
    """Version, CUDA version and devices of the installed torch, or `error` in words."""
    try:
        # By name: this package must run without torch, and nothing of it may depend on it.
        torch: Any = importlib.import_module("torch")
    except (
        Exception
    ) as error:  # A broken build raises whatever its loader likes (OSError, RuntimeError).
        return {"error": f"{type(error).__name__}: {error}"}
    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"name": properties.name, "memory_bytes": properties.total_memory})
    return {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


def plug_in(point: EntryPoint) -> str | None:
    """None if the entry point loads, else why not."""
    try:
        point.load()
    except Exception as error:  # Code of others: whatever it raises is the finding.
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Print the findings."""
    points = {
        group: {point.name: plug_in(point) for point in entry_points(group=group)}
        for group in GROUPS
    }
    print(json.dumps({"torch": torch_build(), "entry_points": points}))


if __name__ == "__main__":
    main()
