"""architecture_of: the sizes of a definition's model, from our tables or from its own files.

The tables come first for models of the hub: a plan must not need a download. Everything else is read from the
`config.json` that the source resolves to.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lilo_definitions.architecture import Architecture
from lilo_definitions.definition import Definition
from lilo_definitions.errors import InvalidSource
from lilo_definitions.families import qwen3, qwen3_5, smollm2
from lilo_definitions.model_config import read_model_config
from lilo_definitions.source import resolve_source

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {**qwen3.ARCHITECTURES, **qwen3_5.ARCHITECTURES, **smollm2.ARCHITECTURES}
)
"""Public models by name on the Hugging Face hub."""


def architecture_of(definition: Definition) -> Architecture:
    """The sizes of this definition's model.

    Raises:
        InvalidSource: the source is neither known nor readable here, or of a family that is not understood.
    """
    source = definition.model.source
    known = ARCHITECTURES.get(source.removeprefix("hf:")) if source.startswith("hf:") else None
    if known is not None:
        return known
    folder = resolve_source(source)
    try:
        return read_model_config(folder).architecture()
    except InvalidSource as error:
        raise InvalidSource(f"model source {source!r}: {error}") from error
