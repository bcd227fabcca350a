"""Read: the `config.json` of a model's folder as a `ModelShape`, by its `model_type`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lilo_engine.errors import InvalidRequest
from pydantic import ValidationError

from lilo_miles_backend.families.llama import read_llama
from lilo_miles_backend.families.qwen3 import read_qwen3
from lilo_miles_backend.families.qwen3_5 import read_qwen3_5
from lilo_miles_backend.families.shape import ModelShape

READERS: Mapping[str, Callable[[dict[str, Any]], ModelShape]] = {
    "llama": read_llama,
    "qwen3": read_qwen3,
    "qwen3_5": read_qwen3_5,
    "qwen3_5_text": read_qwen3_5,
}
"""By `model_type`; the multimodal class and the text class of one family have two."""


def read_shape(folder: Path) -> ModelShape:
    """Read `folder/config.json`.

    Raises:
        InvalidRequest: the file is missing, of a family that is not built here, or names something that is not.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read the model configuration {path}: {error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    reader = READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise InvalidRequest(
            f"{path} describes a model of model_type {kind!r}; built here are {', '.join(READERS)}"
        )
    try:
        return reader(config)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or kind} is {_shown(e['input'])}: {e['msg']}"
            for e in error.errors()
        )
        raise InvalidRequest(
            f"{path} describes a model that is not built here: {problems}"
        ) from error


def _shown(value: object) -> str:
    """A value as a message shows it; not a whole configuration."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, dict) else repr(value)
