"""A server in a process of its own that tests kill: `python -m tests.conformance.held_server DATA PORT`.

Trainer and sampler are in memory. While the file `hold` is in the data folder every pass stands still.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import uvicorn
from lilo_definitions import get
from lilo_engine.app import build_app
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, Output
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.config import DataFolder
from lilo_engine.parts import Parts, open_control
from lilo_engine.sampling.launcher import MemorySamplerLauncher

KEY = "tml-held"


class Held(MemoryBackend):
    """Stands still while it is told to."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._hold = Path(config.checkpoints_root).parent / "hold"

    def forward_backward(self, batch: Batch) -> list[Output]:
        while self._hold.exists():
            time.sleep(0.02)
        return super().forward_backward(batch)


def main() -> None:
    data = DataFolder(root=Path(sys.argv[1]))
    data.create()
    definition = get("tiny")
    control = open_control(data)
    control.keys.create("test", time.time(), key=KEY)
    parts = Parts(
        definition=definition,
        data=data,
        launcher=MemoryLauncher(
            definition=definition, checkpoints_root=data.checkpoints, factory=Held
        ),
        sampler_launcher=MemorySamplerLauncher(definition),
        control=control,
    )
    uvicorn.run(build_app(parts), port=int(sys.argv[2]), log_level="warning")


if __name__ == "__main__":
    main()
