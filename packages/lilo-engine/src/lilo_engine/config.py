"""Configuration of a server, and the only reader of the environment in this package.

Imports no part, so that every command may read it. Limits of a part are a frozen dataclass beside that part.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_path

API_KEY_VARIABLE = "LILO_API_KEY"
DATA_DIR_VARIABLE = "LILO_DATA_DIR"
LOG_LEVEL_VARIABLE = "LILO_LOG_LEVEL"
RECORDS_URL_VARIABLE = "LILO_RECORDS_URL"
RAY_ADDRESS_VARIABLE = "LILO_RAY_ADDRESS"
"""Read by the trainer."""
TRACES_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
CHECKPOINT_VOLUME_VARIABLE = "LILO_CHECKPOINT_VOLUME"
KERNEL_CACHE_VARIABLES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)
"""Folders of what compiles kernels for GPUs."""
KERNEL_CACHE_SWITCHES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",)
"""What must be 1 for kernels to be kept at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFolder:
    """What lies where in a server's data folder."""

    root: Path
    checkpoints_at: Path | None = None
    """Where checkpoints lie if not in `root`: a volume that is mounted elsewhere."""

    @property
    def checkpoints(self) -> Path:
        """Root of the volume that holds published checkpoints."""
        return self.checkpoints_at or self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """Output of the backend and of the sampler."""
        return self.root / "logs"

    @property
    def segments(self) -> Path:
        """Data of passes that does not stay in memory; of one process, empty between two."""
        return self.root / "segments"

    @property
    def kernels(self) -> Path:
        """Compiled for this machine's GPUs: minutes of a start that the next one does not take."""
        return self.root / "kernels"

    @property
    def lock(self) -> Path:
        """Held by the one server that uses the folder."""
        return self.root / "lock"

    def create(self) -> None:
        """Make what is missing.

        Raises:
            OSError: the folder cannot be made or written to.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in (self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        probe = self.root / ".writable"
        probe.touch()
        probe.unlink()


def api_key_from_environment() -> str | None:
    """The key a server accepts, and a local client sends."""
    return os.environ.get(API_KEY_VARIABLE) or None


def records_url() -> str | None:
    """Database for the records; None: the SQLite file in the data folder."""
    return os.environ.get(RECORDS_URL_VARIABLE) or None


def wants_traces() -> bool:
    """Whether a collector for traces is named, by OpenTelemetry's own variables."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not off and any(os.environ.get(name) for name in TRACES_VARIABLES)


def checkpoint_volume_name() -> str | None:
    """Name of the provider's volume that checkpoints lie in; None: they lie in a plain directory."""
    return os.environ.get(CHECKPOINT_VOLUME_VARIABLE) or None


def environment() -> Mapping[str, str]:
    """All variables, for a container that is told by them what it is (`deploy/surroundings.py`)."""
    return dict(os.environ)


def environment_of_children() -> Mapping[str, str]:
    """Without our secrets: the key of clients, and the address of the records, which may have a password in it."""
    secrets = (API_KEY_VARIABLE, RECORDS_URL_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in secrets}


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set variables for the processes that this one starts."""
    os.environ.update(variables)


def keep_kernels(data: DataFolder) -> None:
    """Have what this process starts keep its compiled kernels in the data folder; where one was told another place, there.

    Ranks on the machines of a cluster keep them where their machine does: this folder need not be there.
    """
    if os.environ.get(RAY_ADDRESS_VARIABLE):
        return
    for name in KERNEL_CACHE_VARIABLES:
        os.environ.setdefault(name, str(data.kernels.absolute() / name.lower()))
    for name in KERNEL_CACHE_SWITCHES:
        os.environ.setdefault(name, "1")


def default_data_dir() -> Path:
    """`LILO_DATA_DIR`, else the user's data folder."""
    chosen = os.environ.get(DATA_DIR_VARIABLE)
    return Path(chosen) if chosen else user_data_path("lilo", appauthor=False)


def log_level() -> str:
    """`LILO_LOG_LEVEL`; `WARNING` keeps the terminal for what a person should act on.

    Raises:
        ValueError: it is no level; the message lists them.
    """
    level = os.environ.get(LOG_LEVEL_VARIABLE, "WARNING").upper()
    levels = logging.getLevelNamesMapping()
    if level not in levels:
        raise ValueError(f"{LOG_LEVEL_VARIABLE} is {level!r}; there are {', '.join(levels)}")
    return level
