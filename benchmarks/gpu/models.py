"""Models: the folders of random models that all cases of one run share."""

from __future__ import annotations

import os
from pathlib import Path

from lilo_definitions.architecture import Architecture
from lilo_miles_backend.bench import random_model


def model_folder(
    name: str, layers: int | None = None, interval: int | None = None
) -> tuple[Path, Architecture]:
    """A folder under LILO_BENCH_MODELS, which `run.py` sets; otherwise as `random_model.model_folder`."""
    root = Path(os.environ["LILO_BENCH_MODELS"])
    return random_model.model_folder(root, name, layers, interval)
