"""Machine: what this computer and this environment have, and which definitions that is enough for.

`look()` measures, once; `obstacles()` is a pure decision over what was measured. Read by `lilo doctor`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lilo_definitions import (
    Definition,
    DefinitionError,
    MissingModel,
    architecture_of,
    check_fits_model,
    how_to_get,
    resolve_source,
)
from pydantic import BaseModel, ConfigDict

PROBE_TIMEOUT_S = 120.0
"""Importing torch, megatron-core and ray from a cold disk takes up to a minute."""

TRAINER = "miles"
"""Name in `lilo.backends` of what `lilo serve` starts; `memory`, which this package brings, trains nothing real."""


class Device(BaseModel):
    """One CUDA device."""

    model_config = ConfigDict(frozen=True)

    name: str
    memory_bytes: int


class Torch(BaseModel):
    """The torch build; `error` is set if it is absent or does not import."""

    model_config = ConfigDict(frozen=True)

    version: str | None = None
    cuda: str | None = None
    devices: tuple[Device, ...] = ()
    error: str | None = None


class Probed(BaseModel):
    """What `lilo_engine.cli.probe` prints."""

    model_config = ConfigDict(frozen=True)

    torch: Torch = Torch()
    entry_points: Mapping[str, Mapping[str, str | None]] = {}
    """Group -> name -> None if it loads, else why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is."""

    num_cores: int
    memory_bytes: int
    """Installed, or the container's limit where that is lower."""
    available_bytes: int
    """Of it free now."""
    disk_free_bytes: int
    """In the folder for temporary files."""
    torch: Torch = field(default_factory=Torch)
    entry_points: Mapping[str, Mapping[str, str | None]] = field(
        default_factory=dict[str, Mapping[str, str | None]]
    )

    def working(self, group: str) -> tuple[str, ...]:
        """Names in an entry-point group that load."""
        return tuple(name for name, error in self.entry_points.get(group, {}).items() if not error)


def look() -> Machine:
    """Measure this machine; takes as long as importing torch does."""
    probed = probe()
    memory_bytes, available_bytes = _memory()
    return Machine(
        num_cores=_num_cores(),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        disk_free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        torch=probed.torch,
        entry_points=probed.entry_points,
    )


def probe(timeout_s: float = PROBE_TIMEOUT_S) -> Probed:
    """Run the probe in a process of its own; a failure of it becomes the `error` of torch."""
    # -P: a file in the working directory must not stand in for a module.
    command = [sys.executable, "-P", "-m", "lilo_engine.cli.probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Probed(torch=Torch(error=f"looking at it took over {timeout_s:.0f} s"))
    try:
        # Imports may print; ours is the last line.
        return Probed.model_validate(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Probed(
            torch=Torch(error=f"looking at it ended with code {done.returncode}: {reason}")
        )


def obstacles(definition: Definition, machine: Machine) -> list[str]:
    """Why this definition would not run on this machine; empty if it would."""
    found: list[str] = []
    if TRAINER not in machine.working("lilo.backends"):
        found.append(f"the trainer {TRAINER!r} is not installed")
    if definition.sampler.engine not in machine.working("lilo.samplers"):
        found.append(f"the sampling engine {definition.sampler.engine!r} is not installed")
    topology, num_devices = definition.topology, len(machine.torch.devices)
    if topology.nodes > 1:
        found.append(f"it needs {topology.nodes} nodes, and this is one")
    if topology.device == "cuda" and num_devices < topology.gpus_per_node:
        needed_gpus = "a GPU" if topology.gpus_per_node == 1 else f"{topology.gpus_per_node} GPUs"
        found.append(f"it needs {needed_gpus}; {_gpus_found(machine.torch)}")
    try:
        check_fits_model(definition)
    except MissingModel:
        found.append(f"its model is not here ({how_to_get(definition.model.source)})")
        return [*found, *_undivided(definition)]
    except DefinitionError as error:
        return [*found, str(error)]
    needed = 2 * _weights_bytes(definition)  # Trainer and sampler hold the base weights each.
    if topology.device == "cpu" and needed > machine.available_bytes:
        found.append(
            f"its weights take {needed / 2**30:.1f} GiB in trainer and sampler; "
            f"{machine.available_bytes / 2**30:.1f} GiB of memory are free"
        )
    return found


def _undivided(definition: Definition) -> tuple[str, ...]:
    """Why its layout cannot split its model, as far as that is known without its files."""
    try:
        return architecture_of(definition).undivided(definition.topology.tp)
    except DefinitionError:
        return ()


def _gpus_found(torch: Torch) -> str:
    """How many GPUs can be used, and what to do about too few."""
    if torch.error or torch.version is None:
        return "torch does not work here"
    if torch.cuda is None:
        return f"torch {torch.version} is built for the CPU: install its build for CUDA"
    if not torch.devices:
        return "torch sees none: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return f"torch sees {len(torch.devices)}: lower gpus_per_node with tp, cp or dp"


def _weights_bytes(definition: Definition) -> int:
    """Size of the safetensors files of the base model."""
    folder = resolve_source(definition.model.source)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> tuple[int, int]:
    """Memory in bytes: what there is, and what is free now."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = available = page * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():  # Linux; elsewhere the installed memory is all that can be said.
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit = _container_limit()
    return min(total, limit or total), min(available, limit or available)


def _container_limit() -> int | None:
    """The memory limit in bytes of the control group (version 2) this process runs in, if it has one."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
