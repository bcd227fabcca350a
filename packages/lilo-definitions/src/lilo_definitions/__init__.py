"""What Lilo can train, as validated data.

`get(name)` returns a `Definition`; `names()` lists what is installed; `resolve_source` finds the model's folder.
Pure data: no torch, no Ray, no network.
"""

from lilo_definitions.architecture import Architecture, LinearAttention
from lilo_definitions.architectures import ARCHITECTURES, architecture_of
from lilo_definitions.catalogue import get, names
from lilo_definitions.definition import Definition
from lilo_definitions.deployment import Deployment
from lilo_definitions.digest import canonical_json, digest
from lilo_definitions.errors import (
    DefinitionError,
    InvalidDefinition,
    InvalidSource,
    MissingModel,
    UnknownDefinition,
)
from lilo_definitions.fit import check_fits_model
from lilo_definitions.gpus import GPUS, Gpu, GpuName
from lilo_definitions.limits import Limits
from lilo_definitions.lora import Lora
from lilo_definitions.miles_args import miles_args
from lilo_definitions.model import ModelSpec
from lilo_definitions.model_config import ModelConfig, read_model_config
from lilo_definitions.part import Part
from lilo_definitions.sampler import Pool, Sampler
from lilo_definitions.source import how_to_get, resolve_source
from lilo_definitions.topology import Topology
from lilo_definitions.trainer import Trainer

__all__ = [
    "ARCHITECTURES",
    "GPUS",
    "Architecture",
    "Definition",
    "DefinitionError",
    "Deployment",
    "Gpu",
    "GpuName",
    "InvalidDefinition",
    "InvalidSource",
    "Limits",
    "LinearAttention",
    "Lora",
    "MissingModel",
    "ModelConfig",
    "ModelSpec",
    "Part",
    "Pool",
    "Sampler",
    "Topology",
    "Trainer",
    "UnknownDefinition",
    "architecture_of",
    "canonical_json",
    "check_fits_model",
    "digest",
    "get",
    "how_to_get",
    "miles_args",
    "names",
    "read_model_config",
    "resolve_source",
]
