"""SmolLM2: a Llama of 135 million parameters, small enough for a laptop and large enough to speak English."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lilo_definitions.architecture import Architecture
from lilo_definitions.definition import Definition
from lilo_definitions.families.model_spec import by_name, model_spec
from lilo_definitions.limits import Limits
from lilo_definitions.lora import Lora
from lilo_definitions.sampler import Sampler
from lilo_definitions.topology import Topology

_135M = Architecture(
    family="llama",
    layers=30,
    hidden=576,
    inner=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49_152,
    context=8192,
    tied=True,
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {"HuggingFaceTB/SmolLM2-135M": _135M, "HuggingFaceTB/SmolLM2-135M-Instruct": _135M}
)
"""By name on the Hugging Face hub."""


def smollm2_135m() -> Definition:
    """The instruction-tuned model on one CPU rank: 16 adapters, 2k tokens."""
    return Definition(
        name="smollm2_135m",
        summary="SmolLM2 135M at 2k on one CPU rank",
        model=model_spec("HuggingFaceTB/SmolLM2-135M-Instruct", ARCHITECTURES),
        context=2048,
        dtype="float32",
        lora=Lora(slots=16, max_rank=32, alpha=32.0, targets=("attn", "mlp", "unembed")),
        topology=Topology(device="cpu"),
        # Activations of 4,096 tokens take about 5 GB; a microbatch of that size takes some ten seconds on two cores.
        limits=Limits(
            max_tokens_per_rank=4096,
            max_batch_tokens=16_384,
            startup_timeout_s=120.0,
            command_s_per_token=0.05,
            distributed_timeout_minutes=10.0,
        ),
        sampler=Sampler(engine="embedded", sequences=16, max_adapters=32, ephemeral_versions=16),
    )


RECIPES = by_name(smollm2_135m)
"""The definitions of this family."""
