"""Residents: the adapters of this rank by model, and the rules for making and replacing them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lilo_definitions import Definition
from lilo_engine.commands.command import TargetGroup
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.operation import LoraSpec, ModelId

from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.lora import LoraSite
from lilo_miles_backend.ranks.slots import SlotTable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resident:
    asked: LoraSpec
    adapter: Adapter


class Residents:
    """All adapters of one rank."""

    def __init__(
        self, definition: Definition, sites: Sequence[LoraSite], device: torch.device
    ) -> None:
        self._definition = definition
        self._sites = sites
        self._device = device
        self._slots = SlotTable(definition.lora.slots)
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
        spec = _honoured(asked, self._definition, drawn_seed)
        sites = [site for site in self._sites if site.group in _groups(spec)]
        self._slots.take(model_id)
        try:
            adapter = Adapter(spec, sites, self._device)
        except BaseException:
            self._slots.free(model_id)
            raise
        self._held[model_id] = _Resident(asked=asked, adapter=adapter)

    def __contains__(self, model_id: ModelId) -> bool:
        """Whether the model is resident."""
        return model_id in self._held

    def adapter(self, model_id: ModelId) -> Adapter:
        """The model's adapter.

        Raises:
            NotFound: it is not resident.
        """
        self._slots.of(model_id)
        return self._held[model_id].adapter

    def remove(self, model_id: ModelId) -> None:
        """Free the slot and its memory; unknown models are no error."""
        self._held.pop(model_id, None)
        self._slots.free(model_id)

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


def _groups(spec: LoraSpec) -> set[TargetGroup]:
    flags: dict[TargetGroup, bool] = {
        "attn": spec.train_attn,
        "mlp": spec.train_mlp,
        "unembed": spec.train_unembed,
    }
    return {group for group, on in flags.items() if on}


def _honoured(asked: LoraSpec, definition: Definition, drawn_seed: int) -> LoraSpec:
    """What will be trained: the seed drawn, and no head where the definition has none.

    The SDK asks for train_unembed by default; a definition without `unembed` trains without it instead of refusing
    every client.
    """
    limits = definition.lora
    if not 1 <= asked.lora_rank <= limits.max_rank:
        raise InvalidRequest(f"lora_rank is {asked.lora_rank}; expected 1 to {limits.max_rank}")
    if not asked.alpha > 0:
        raise InvalidRequest(f"alpha is {asked.alpha}; expected a positive number")
    spec = replace(asked, seed=drawn_seed if asked.seed is None else asked.seed)
    if spec.train_unembed and "unembed" not in limits.targets:
        _log.warning("definition %s trains no unembed adapters; going on without", definition.name)
        spec = replace(spec, train_unembed=False)
    offered = ", ".join(limits.targets)
    refused = sorted(_groups(spec) - set(limits.targets))
    if refused:
        raise InvalidRequest(
            f"train_{refused[0]} is on, but definition {definition.name!r} adapts only {offered}"
        )
    if not _groups(spec):
        raise InvalidRequest(f"nothing would be trained; turn on at least one of {offered}")
    return spec
