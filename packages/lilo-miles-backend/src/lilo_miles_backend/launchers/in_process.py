"""InProcessRanks: a trainer of one rank that lives in the driver's own process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Published, RankProgress

from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.ranks import Reply
from lilo_miles_backend.rank_commands import Fetch, Persist, RankInfo, TrainCommand

if TYPE_CHECKING:
    from lilo_miles_backend.ranks.rank import Rank


class InProcessRanks:
    """World of one: a command is a call."""

    def __init__(self, config: BackendConfig, settings: BackendSettings) -> None:
        # Importing a rank loads torch and Megatron (seconds), which only a process that trains should pay.
        from lilo_miles_backend.ranks.rank import Rank  # noqa: PLC0415

        self._rank: Rank = Rank(config, settings)
        self._train_mailbox = threading.Lock()

    def info(self) -> tuple[RankInfo, ...]:
        """The one rank."""
        return (self._rank.info(),)

    def train(self, command: TrainCommand) -> Reply:
        """Run the command in the calling thread, after any that came before."""
        with self._train_mailbox:
            return self._rank.execute(command)

    def persist(self, command: Persist) -> Published:
        """Publish in the calling thread."""
        return cast(Published, self._rank.persist(command))

    def fetch(self, command: Fetch) -> None:
        """Read in the calling thread."""
        self._rank.persist(command)

    def progress(self) -> tuple[RankProgress, ...]:
        """The one rank's counters."""
        return (self._rank.progress(),)

    def wait_lost(self) -> str:
        """Never returns: the one rank is lost with its driver."""
        threading.Event().wait()
        raise AssertionError("nobody sets it")

    def close(self) -> None:
        """Leave the process groups and free the model."""
        with self._train_mailbox:
            self._rank.close()

    @property
    def rank(self) -> Rank:
        """The rank itself, for reading what no command returns (gradients in a parity check)."""
        return self._rank
