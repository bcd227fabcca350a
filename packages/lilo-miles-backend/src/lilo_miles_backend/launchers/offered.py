"""What this version of the trainer can build, asked of a definition before anything is started.

A definition may name things that come later; each is refused here by its field's name, never ignored. A feature that
arrives removes its line.
"""

from __future__ import annotations

from lilo_definitions import Definition
from lilo_engine.errors import InvalidRequest

FAMILIES = ("llama", "qwen3", "qwen3_5")
"""Families whose layers and weight map are built."""


def check_offered(definition: Definition) -> None:
    """Refuse a definition that asks for what no part of this version does.

    Raises:
        InvalidRequest: names every such field, its value, and what is offered.
    """
    if refused := _refused(definition):
        raise InvalidRequest(
            f"definition {definition.name!r} asks for what this version of lilo-miles-backend does not do: "
            + "; ".join(refused)
        )


def _refused(definition: Definition) -> list[str]:
    """Every field that would be lost, as a sentence."""
    topology, trainer = definition.topology, definition.trainer
    claims: list[tuple[bool, str, object, str]] = [
        (
            definition.model.family in FAMILIES,
            "model.family",
            definition.model.family,
            ", ".join(FAMILIES),
        ),
        (not topology.rdma, "topology.rdma", topology.rdma, "false"),
        (
            # What runs on CPU is deterministic without being asked; attention's backward on GPUs is not.
            topology.device == "cpu" or not trainer.deterministic,
            "trainer.deterministic",
            trainer.deterministic,
            "false on cuda",
        ),
    ]
    return [
        f"{field} is {value!r} (offered: {offered})"
        for holds, field, value, offered in claims
        if not holds
    ]
