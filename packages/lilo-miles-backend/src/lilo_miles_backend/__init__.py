"""Lilo's trainer: megatron-core ranks that hold many LoRA adapters over one frozen base model.

A driver (`backend.py`) broadcasts commands to ranks (`ranks/`), which turn captures into published checkpoints
(`checkpoints/`). The embedded sampling engine lives in `sampler/`. Importing this package loads no torch: only
building a `MilesBackend` does.
"""

from lilo_miles_backend.backend import MilesBackend

__all__ = ["MilesBackend"]
