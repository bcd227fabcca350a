"""What Lilo can train, as validated data.

`get(name)` returns a `Definition`; `names()` lists what is installed; `resolve_source` finds the model's folder.
Pure data: no torch, no Ray, no network.
"""

from lilo_definitions.catalogue import get, names
from lilo_definitions.definition import Definition, Limits, Lora, ModelSpec, Sampler, Topology
from lilo_definitions.digest import canonical_json, digest
from lilo_definitions.errors import (
    DefinitionError,
    InvalidDefinition,
    InvalidSource,
    UnknownDefinition,
)
from lilo_definitions.fit import ModelConfig, check_fits_model, read_model_config
from lilo_definitions.source import resolve_source

__all__ = [
    "Definition",
    "DefinitionError",
    "InvalidDefinition",
    "InvalidSource",
    "Limits",
    "Lora",
    "ModelConfig",
    "ModelSpec",
    "Sampler",
    "Topology",
    "UnknownDefinition",
    "canonical_json",
    "check_fits_model",
    "digest",
    "get",
    "names",
    "read_model_config",
    "resolve_source",
]
