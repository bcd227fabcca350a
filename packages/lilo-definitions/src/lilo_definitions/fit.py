"""Does a definition fit the model that its source holds? Read from `config.json`, before any weight is read.

Complements the checks inside `Definition`, which see only the definition's own fields. `lilo doctor` and whoever starts
a trainer call it, so that a wrong number is a sentence and not a shape error from the middle of a rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lilo_definitions.definition import Definition
from lilo_definitions.errors import InvalidDefinition, InvalidSource
from lilo_definitions.source import resolve_source

_Count = Annotated[int, Field(gt=0)]


class ModelConfig(BaseModel):
    """The fields of a model's `config.json` that a definition depends on; the others are the trainer's business."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    model_type: str
    """Family name as transformers has it; equals `ModelSpec.family`."""
    vocab_size: _Count
    """Rows of the embedding."""
    hidden_size: _Count
    """Width of the residual stream."""
    num_attention_heads: _Count
    """Query heads."""
    num_key_value_heads: _Count
    """Key and value heads; a query head shares one with others."""
    intermediate_size: _Count
    """Width inside the MLP."""
    max_position_embeddings: _Count
    """Longest sequence in tokens."""


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a model folder.

    Raises:
        InvalidSource: it cannot be read, is not JSON, or lacks a field.
    """
    path = folder / "config.json"
    try:
        return ModelConfig.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        reason = str(error) if not isinstance(error, ValidationError) else _fields(error)
        raise InvalidSource(f"{path} is not a model configuration: {reason}") from error


def check_fits_model(definition: Definition) -> ModelConfig:
    """Compare a definition with its model, and return what was read.

    Raises:
        InvalidSource: the source does not resolve to a readable model folder.
        InvalidDefinition: numbers do not fit; the message lists all of them.
    """
    config = read_model_config(resolve_source(definition.model.source))
    if misfits := _misfits(definition, config):
        raise InvalidDefinition(
            f"definition {definition.name!r} does not fit {definition.model.source!r}: "
            + "; ".join(misfits)
        )
    return config


def _misfits(definition: Definition, config: ModelConfig) -> list[str]:
    """Every number that does not fit, as a sentence."""
    model, tp = definition.model, definition.topology.tp
    smallest = min(config.hidden_size, config.intermediate_size)
    divided = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "MLP columns": config.intermediate_size,
    }
    claims: list[tuple[bool, str]] = [
        (
            model.family == config.model_type,
            f"family is {model.family!r}, config.json says {config.model_type!r}",
        ),
        (
            model.vocab_size == config.vocab_size,
            f"vocab_size is {model.vocab_size}, config.json says {config.vocab_size}",
        ),
        (
            model.context <= config.max_position_embeddings,
            f"model context {model.context} is over the {config.max_position_embeddings} positions of config.json",
        ),
        (
            definition.lora.max_rank <= smallest,
            f"max_rank {definition.lora.max_rank} is over the smallest matrix side {smallest}",
        ),
        *(
            (num % tp == 0, f"{num} {what} cannot be divided by tp {tp}")
            for what, num in divided.items()
        ),
    ]
    return [sentence for holds, sentence in claims if not holds]


def _fields(error: ValidationError) -> str:
    """The fields at fault, without pydantic's links."""
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
