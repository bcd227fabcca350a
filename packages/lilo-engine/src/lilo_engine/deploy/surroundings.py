"""Surroundings: what a container is told by its variables, checked once. The names are in `places.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lilo_definitions import Definition
from pydantic import ValidationError

from lilo_engine.deploy import places
from lilo_engine.errors import ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where a trainer container finds things."""

    app: str
    definition: Definition
    data_dir: Path
    checkpoint_volume: str | None
    """Name at the provider; None: `checkpoint_root` is a plain folder, as in a trial on one's own machine."""
    checkpoint_root: Path
    """Where training and sampling publish, inside the mount."""

    @property
    def records_root(self) -> Path:
        """Where snapshots of the records are published: beside the states, in the same volume."""
        return self.checkpoint_root.parent / places.RECORDS_FOLDER

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Surroundings:
        """Read them.

        Raises:
            ServerError: one is missing, or the definition does not hold; the message names the variable.
        """
        text = _needed(variables, places.DEFINITION)
        try:
            definition = Definition.model_validate_json(text)
        except ValidationError as error:
            reasons = "; ".join(item["msg"] for item in error.errors())
            raise ServerError(
                f"{places.DEFINITION} holds no definition that this version of lilo-definitions reads: {reasons}; "
                "deploy it again, with the packages that wrote it"
            ) from error
        return cls(
            app=_needed(variables, places.APP),
            definition=definition,
            data_dir=Path(_needed(variables, places.DATA_DIR)),
            checkpoint_volume=variables.get(places.CHECKPOINT_VOLUME) or None,
            checkpoint_root=Path(_needed(variables, places.CHECKPOINT_ROOT)),
        )


def _needed(variables: Mapping[str, str], name: str) -> str:
    if value := variables.get(name):
        return value
    raise ServerError(
        f"{name} is not set; `lilo deploy` hands it to every container, so this one was started otherwise"
    )
