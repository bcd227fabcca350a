"""ModelSpec: the frozen base model of a definition: its name, its files, and the two numbers that requests are checked against.

Not its architecture: that is read from the model's own `config.json` (`fit.py`), or, for planning without the files,
from the tables in `families/`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lilo_definitions.part import Part


class ModelSpec(Part):
    """The base model."""

    name: str = Field(min_length=1)
    """What clients pass as `base_model`. Definitions of one model differ by what follows a colon, as
    `Qwen/Qwen3.8-27B:256k`: the SDK looks a tokenizer up by what stands before it."""
    source: str = Field(min_length=1)
    """A directory with `config.json` and safetensors, `package:MODULE/FOLDER` for package data, or `hf:ORG/NAME` for a
    model that was downloaded before: a string that every machine resolves for itself."""
    family: Literal["qwen3", "qwen3_5", "llama"]
    """Which weight map and layer structure the trainer and the sampler use; transformers' `model_type`."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding; token ids are below it, and are refused before they can touch a device."""
    context: int = Field(gt=0)
    """Longest model input in tokens that the model itself can take; position tables end there."""
