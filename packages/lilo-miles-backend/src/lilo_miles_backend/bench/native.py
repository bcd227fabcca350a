"""Native: the trainer as a server has it, without a server: a driver, its ranks, and steps with an optimizer.

Measured by `lilo bench trainer` and by `benchmarks/gpu/`. Every step is what `forward_backward` and `optim_step` of a client come to: the same batches, the same commands, logprobs
back in the host's memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from lilo_definitions import Definition
from lilo_definitions.architecture import Architecture
from lilo_definitions.limits import Limits
from lilo_definitions.lora import Lora
from lilo_definitions.model import ModelSpec
from lilo_definitions.topology import Topology
from lilo_definitions.trainer import Trainer as Settings
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, Output, WorkItem
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.tensor import Tensor

from lilo_miles_backend.backend import MilesBackend

LORA_RANK = 32
"""Of every adapter that is measured."""
ADAM = AdamParams(
    learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a trainer is measured in."""

    device: str = "cuda"
    tp: int = 1
    cp: int = 1
    keep: str = "all"
    """`Trainer.keep_activations` of the definition."""
    slots: int = 1
    packs_models: bool = False
    dtype: str = "bfloat16"


def definition(
    folder: Path, architecture: Architecture, context: int, layout: Layout
) -> Definition:
    """A definition for rows up to `context` tokens, one of which is a microbatch."""
    gpus = layout.tp * layout.cp if layout.device == "cuda" else 0
    spec = ModelSpec(
        name=folder.name,
        source=str(folder),
        family=architecture.family,
        vocab_size=architecture.vocab,
        context=architecture.context,
    )
    settings: dict[str, Any] = {
        "keep_activations": layout.keep,
        "pack_models": layout.packs_models,
    }
    return Definition(
        name=folder.name,
        summary="A random model that is measured",
        model=spec,
        context=context,
        dtype=layout.dtype,  # pyright: ignore[reportArgumentType] - checked when it is built
        lora=Lora(slots=layout.slots, max_rank=LORA_RANK, alpha=32.0, targets=("attn", "mlp")),
        topology=Topology(
            device=layout.device,  # pyright: ignore[reportArgumentType]
            gpus_per_node=gpus,
            tp=layout.tp,
            cp=layout.cp,
        ),
        trainer=Settings(**settings),
        limits=Limits(max_tokens_per_rank=-(-context // layout.cp), max_batch_tokens=4 * context),
    )


class Trainer:
    """A driver with resident adapters; a context manager."""

    def __init__(self, what: Definition, adapters: int = 1) -> None:
        """Start ranks and make `adapters` models."""
        self._folder = tempfile.TemporaryDirectory(prefix="lilo-bench-")
        self.definition = what
        self.backend = MilesBackend(
            BackendConfig(definition=what, checkpoints_root=self._folder.name, epoch=1)
        )
        self.models = [ModelId(f"m{index}") for index in range(adapters)]
        for seed, model_id in enumerate(self.models):
            self.backend.create_adapter(model_id, spec(seed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks."""
        self.backend.close()
        self._folder.cleanup()

    def run(
        self, data: Mapping[ModelId, Sequence[Datum]], *, forward_only: bool = False
    ) -> list[Output]:
        """One pass over the datums of each model, together.

        Raises:
            RuntimeError: an item failed; says why.
        """
        items = tuple(
            WorkItem(operation_id=model_id, model_id=model_id, datums=tuple(datums))
            for model_id, datums in data.items()
        )
        batch = Batch(loss="cross_entropy", config={}, forward_only=forward_only, items=items)
        outputs = self.backend.forward_backward(batch)
        if failures := [output.error for output in outputs if output.error]:
            raise RuntimeError(failures[0])
        return outputs

    def step(self, data: Mapping[ModelId, Sequence[Datum]]) -> list[Output]:
        """A pass, then the optimizer of each model."""
        outputs = self.run(data)
        for model_id in data:
            self.backend.optim_step(model_id, ADAM)
        return outputs


def spec(seed: int) -> LoraSpec:
    """Every linear but the head."""
    return LoraSpec(
        lora_rank=LORA_RANK,
        alpha=float(LORA_RANK),
        seed=seed,
        train_attn=True,
        train_mlp=True,
        train_unembed=False,
    )


def random_datums(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[Datum]:
    """Random tokens, each predicted from those before it; weights that make the sum of all losses a mean."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    return [_random_datum(length, vocabulary, rng, 1.0 / total) for length in lengths]


def _random_datum(length: int, vocabulary: int, rng: np.random.Generator, weight: float) -> Datum:
    ids = rng.integers(0, vocabulary, length + 1)
    weights = np.full(length, weight)
    return Datum(
        tokens=Tensor.of(ids[:-1], "int32"),
        loss_inputs={
            "target_tokens": Tensor.of(ids[1:], "int64"),
            "weights": Tensor.of(weights, "float32"),
        },
    )
