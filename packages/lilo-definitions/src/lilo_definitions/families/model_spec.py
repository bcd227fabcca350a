"""model_spec: the `ModelSpec` of a public model from its name and its architecture."""

from __future__ import annotations

from lilo_definitions.architecture import Architecture
from lilo_definitions.model import ModelSpec


def model_spec(hub_name: str, architecture: Architecture, *, suffix: str = "") -> ModelSpec:
    """The spec of a model on the Hugging Face hub, read from where it was downloaded to.

    Args:
        hub_name: as `Qwen/Qwen3-8B`.
        architecture: its sizes.
        suffix: what tells this definition's name from others of the same model, as `64k`.
    """
    return ModelSpec(
        name=f"{hub_name}:{suffix}" if suffix else hub_name,
        source=f"hf:{hub_name}",
        family=architecture.family,
        vocab_size=architecture.vocab,
        context=architecture.context,
    )
