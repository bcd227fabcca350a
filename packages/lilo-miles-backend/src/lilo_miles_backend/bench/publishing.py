"""Publishing: a trainer's adapter on its way to a sampler: captured, published on a volume, loaded, and a first token."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Self

from lilo_definitions import Definition
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Destination
from lilo_engine.operations.operation import LoraSpec, ModelId

from lilo_miles_backend.backend import MilesBackend
from lilo_miles_backend.bench.sampling_native import NativeSampler

_RUN = "bench"


class Publishing:
    """A trainer of one model in this process, beside a sampler; a context manager."""

    def __init__(self, definition: Definition, sampler: NativeSampler, *, lora_rank: int) -> None:
        """Start the trainer.

        Args:
            definition: with one rank.
            sampler: what loads and samples.
            lora_rank: of the adapter, which stands at every linear of the layers.
        """
        self._sampler = sampler
        self._volume = tempfile.TemporaryDirectory(prefix="lilo-bench-")
        self._number = 0
        self._backend = MilesBackend(
            BackendConfig(definition=definition, checkpoints_root=self._volume.name, epoch=1)
        )
        self._backend.create_adapter(
            ModelId(_RUN),
            LoraSpec(
                lora_rank=lora_rank,
                alpha=float(lora_rank),
                seed=0,
                train_attn=True,
                train_mlp=True,
                train_unembed=False,
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the trainer and remove what it published."""
        self._backend.close()
        self._volume.cleanup()

    def publish(self, prompt: Sequence[int]) -> None:
        """From the trainer's device to a first token of these weights."""
        self._number += 1
        capture = self._backend.capture(ModelId(_RUN), "sampler")
        published = self._backend.persist(
            capture,
            Destination(
                run_id=_RUN,
                kind="sampler_weights",
                name=self._name,
                order=self._number,
                overwrite=False,
            ),
        )
        self._sampler.load(self._name, published.folder)
        self._sampler.generate([prompt], new_tokens=1, adapters=[self._name])

    def forget(self) -> None:
        """Have the sampler drop the newest weights."""
        self._sampler.unload(self._name)

    @property
    def _name(self) -> str:
        return f"v{self._number}"
