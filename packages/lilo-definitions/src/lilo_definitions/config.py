"""Where models lie on this machine: the only reader of the environment in this package."""

from __future__ import annotations

import os
from pathlib import Path

MODELS_VARIABLE = "LILO_MODELS"
"""A folder with one model per `ORG/NAME` in it."""


def models_folder() -> Path | None:
    """The folder that LILO_MODELS names."""
    text = os.environ.get(MODELS_VARIABLE)
    return Path(text).expanduser().absolute() if text else None


def hub_cache() -> Path:
    """The cache that Hugging Face's own tools download into: HF_HUB_CACHE, else HF_HOME/hub."""
    given = os.environ.get("HF_HUB_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser().absolute() / "hub"
