"""What the families share: the `ModelSpec` of a public model from its sizes, and the mapping of a file's recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lilo_definitions.architecture import Architecture
from lilo_definitions.definition import Definition
from lilo_definitions.model import ModelSpec


def model_spec(
    hub_name: str, architectures: Mapping[str, Architecture], *, suffix: str = ""
) -> ModelSpec:
    """The spec of a model on the Hugging Face hub, read from where it was downloaded to.

    Args:
        hub_name: as `Qwen/Qwen3-8B`.
        architectures: the family's sizes by such names.
        suffix: what tells this definition's name from others of the same model, as `64k`.
    """
    sizes = architectures[hub_name]
    return ModelSpec(
        name=f"{hub_name}:{suffix}" if suffix else hub_name,
        source=f"hf:{hub_name}",
        family=sizes.family,
        vocab_size=sizes.vocab,
        context=sizes.context,
    )


def by_name(*recipes: Callable[[], Definition]) -> Mapping[str, Callable[[], Definition]]:
    """A catalogue of recipes, each under its function's name, which is its definition's."""
    return MappingProxyType({recipe.__name__: recipe for recipe in recipes})
