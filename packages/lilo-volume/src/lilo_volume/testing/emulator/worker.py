"""Worker: one container's process, told by its parent what to do. `OneProcessEach` starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lilo_volume.errors import VolumeError
from lilo_volume.testing.emulator.actor import Actor, word_of
from lilo_volume.testing.emulator.emulator import Emulator
from lilo_volume.testing.emulator.modes import Modes


def main() -> None:
    """Do what each line of standard input says, until it ends."""
    actor: Actor | None = None
    for line in sys.stdin:
        operation, args = json.loads(line)
        seen, word = "", ""
        if operation == "use":
            folder, task_id, modes = args
            if actor is not None:
                actor.end()
            emulator = Emulator(Path(folder), modes=Modes(**modes), shared=True)
            actor = Actor(emulator, emulator.attach(task_id))
        else:
            assert actor is not None, "the first line says what to use"
            try:
                seen = actor.do(operation, args)
            except VolumeError as error:
                word = word_of(error)
        sys.stdout.write(json.dumps({"seen": seen, "error": word}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
