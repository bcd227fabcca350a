"""Metadata: what a manifest says of an adapter, so that nobody has to open its tensors to list or recreate it.

Keys: `base_model`, those of `lilo_engine.operations.lora_metadata`, `optimizer_step`; beside them everything of
`Destination.metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lilo_engine.operations.lora_metadata import lora_to_metadata

from lilo_miles_backend.adapter_state import AdapterState


def describe(state: AdapterState, extra: Mapping[str, str]) -> dict[str, str]:
    """Metadata of a checkpoint of `state`: `extra` and the keys above, which win."""
    return {
        # A seed that the trainer drew is absent, whatever a client notes under that name.
        **{key: text for key, text in extra.items() if key != "seed"},
        "base_model": state.base_model,
        **lora_to_metadata(state.spec),
        "optimizer_step": str(state.optimizer_step),
    }
