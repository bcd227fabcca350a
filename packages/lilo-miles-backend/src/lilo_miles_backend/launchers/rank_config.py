"""RankConfig: what a driver tells a spawned rank's process: the line of JSON on its standard input."""

from __future__ import annotations

from lilo_definitions import Definition
from lilo_engine.commands.backend import BackendConfig
from pydantic import BaseModel, ConfigDict

from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.mailboxes import Mailbox
from lilo_miles_backend.ranks.place import RankPlace


class RankConfig(BaseModel):
    """What the driver tells a rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    definition: Definition
    checkpoints_root: str
    epoch: int
    settings: BackendSettings
    place: RankPlace
    descriptors: dict[Mailbox, list[int]]
    """Inherited stream sockets; one thread serves each."""

    @property
    def backend(self) -> BackendConfig:
        """What a rank is built from."""
        return BackendConfig(
            definition=self.definition, checkpoints_root=self.checkpoints_root, epoch=self.epoch
        )
