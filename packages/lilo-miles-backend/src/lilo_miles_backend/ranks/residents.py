"""Residents: the adapters of this rank by model, and the rules for making and replacing them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from lilo_definitions import Definition
from lilo_engine.errors import InvalidRequest, NotFound, Saturated
from lilo_engine.operations.lora_rules import groups_of, honoured
from lilo_engine.operations.operation import LoraSpec, ModelId

from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.ranks.dtype import compute_dtype
from lilo_miles_backend.ranks.sites import LoraSite, factor_shards
from lilo_miles_backend.shards import FactorShard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resident:
    asked: LoraSpec
    adapter: Adapter


class Residents:
    """All adapters of one rank."""

    def __init__(
        self,
        definition: Definition,
        sites: Sequence[LoraSite],
        device: torch.device,
        tp: Axis = ALONE,
    ) -> None:
        self._definition = definition
        self._sites = sites
        self._device = device
        self._tp = tp
        self._held: dict[ModelId, _Resident] = {}

    def create(self, model_id: ModelId, asked: LoraSpec, drawn_seed: int) -> None:
        """Make a fresh adapter; the same spec again does nothing.

        Raises:
            InvalidRequest: the spec cannot be honoured, or the model is resident with another one.
            Saturated: no slot is free.
        """
        if model_id in self._held:
            held = self._held[model_id].asked
            if held != asked:
                raise InvalidRequest(
                    f"model {model_id!r} is resident with {held}; it cannot be made again with {asked}"
                )
            return
        spec = honoured(asked, self._definition)
        if spec != asked:
            _log.warning("%s trains no unembed adapters; going on without", self._definition.name)
        if spec.seed is None:
            spec = replace(spec, seed=drawn_seed)
        if len(self._held) >= self._definition.lora.slots:
            raise Saturated(
                f"all {self._definition.lora.slots} adapter slots are taken; unload a model or wait until one is idle"
            )
        adapter = Adapter(
            spec,
            self._sites_of(spec),
            self._device,
            self._tp,
            dtype=compute_dtype(self._definition),
        )
        self._held[model_id] = _Resident(asked=asked, adapter=adapter)

    def shards_of(self, spec: LoraSpec) -> Mapping[str, FactorShard]:
        """Which factors an adapter of this shape has, and which part of each this rank holds; any thread may ask."""
        return factor_shards(self._sites_of(spec), spec.lora_rank, self._tp)

    def _sites_of(self, spec: LoraSpec) -> list[LoraSite]:
        return [site for site in self._sites if site.group in groups_of(spec)]

    def __contains__(self, model_id: ModelId) -> bool:
        """Whether the model is resident."""
        return model_id in self._held

    def adapter(self, model_id: ModelId) -> Adapter:
        """The model's adapter.

        Raises:
            NotFound: it is not resident.
        """
        if model_id not in self._held:
            raise NotFound(f"model {model_id!r} is not resident in this trainer; create it first")
        return self._held[model_id].adapter

    def remove(self, model_id: ModelId) -> None:
        """Free the slot and its memory; unknown models are no error."""
        self._held.pop(model_id, None)

    def check_fits(self, model_id: ModelId, state: AdapterState, source: str) -> None:
        """Refuse a checkpoint that would not be exactly this model's state.

        Raises:
            InvalidRequest: names the differing fields on both sides.
        """
        adapter = self.adapter(model_id)
        ours, theirs = (
            _identity(self._definition.model.name, adapter.spec),
            _identity(state.base_model, state.spec),
        )
        different = [
            f"{name} is {theirs[name]} there and {ours[name]} here"
            for name in ours
            if ours[name] != theirs[name]
        ]
        if different:
            raise InvalidRequest(
                f"{source} does not fit model {model_id!r}: {'; '.join(different)}; "
                "create a model of the checkpoint's kind and load it there"
            )
        sizes = {name: tuple(tensor.shape) for name, tensor in state.weights.items()}
        if sizes != dict(adapter.sizes):
            odd = sorted(set(sizes.items()) ^ set(adapter.sizes.items()))[:3]
            raise InvalidRequest(f"{source} holds other tensors than model {model_id!r}: {odd}")


def _identity(base_model: str, spec: LoraSpec) -> dict[str, object]:
    return {
        "base_model": base_model,
        "lora_rank": spec.lora_rank,
        "alpha": spec.alpha,
        "train_attn": spec.train_attn,
        "train_mlp": spec.train_mlp,
        "train_unembed": spec.train_unembed,
    }
