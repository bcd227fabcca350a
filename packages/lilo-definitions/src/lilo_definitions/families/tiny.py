"""tiny: a byte-level Qwen3 of 0.8 million parameters that ships with this package.

Not a useful language model: it was trained on sums, with some wrong ones among them, so that reinforcement learning on
two CPU cores has something to improve within minutes (`scripts/make_tiny_model.py` makes it). Demo, tests and benchmarks
run on it; ids below 256 are bytes.
"""

from __future__ import annotations

from lilo_definitions.definition import Definition
from lilo_definitions.limits import Limits
from lilo_definitions.lora import Lora
from lilo_definitions.model import ModelSpec
from lilo_definitions.sampler import Sampler
from lilo_definitions.topology import Topology


def tiny() -> Definition:
    """The definition `tiny`: one CPU rank, 32 adapters of rank up to 32, context 1,024."""
    return Definition(
        name="tiny",
        summary="Byte-level 0.8M Qwen3 on one CPU rank; for demos, tests and trying things out",
        model=ModelSpec(
            name="tiny",
            source="package:lilo_definitions/data/tiny",
            family="qwen3",
            vocab_size=260,
            context=1024,
        ),
        context=1024,
        dtype="float32",
        lora=Lora(slots=32, max_rank=32, alpha=32.0, targets=("attn", "mlp", "unembed")),
        topology=Topology(device="cpu"),
        # 8,192 tokens of activations and logits of this model take about 400 MB; a microbatch of that size takes
        # about half a second, so that no other model waits long.
        limits=Limits(
            max_tokens_per_rank=8192,
            max_batch_tokens=32768,
            startup_timeout_s=120.0,
            command_timeout_s=60.0,
            command_s_per_token=0.005,
            distributed_timeout_minutes=5.0,
        ),
        sampler=Sampler(engine="embedded", sequences=64, max_adapters=64, ephemeral_versions=16),
    )
