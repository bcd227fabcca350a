"""What Lilo can train, as validated data."""

from lilo_definitions.definition import Definition, Limits, Lora, ModelSpec, Sampler, Topology

__all__ = ["Definition", "Limits", "Lora", "ModelSpec", "Sampler", "Topology"]
