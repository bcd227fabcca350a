"""Serve backend: main of the backend process: `python -m lilo_engine.commands.serve_backend`. Not for people.

`child.py` says how it is started and ends with its parent; `ChildConfig` is the line that it is told.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import NoReturn

from lilo_definitions import Definition
from pydantic import BaseModel, ConfigDict

from lilo_engine.commands import bridge_server
from lilo_engine.commands.backend import Backend, BackendConfig
from lilo_engine.commands.bridge import Channel
from lilo_engine.commands.child import begin_child
from lilo_engine.commands.discovery import find_backend
from lilo_engine.errors import LiloError

_log = logging.getLogger(__name__)

LOST = 4
"""Exit code when the trainer gave itself up; its cause is the last line of the log."""

ANSWER_S = 0.5
"""For the answer to the command in which a trainer was lost: it tells the cause better than the log does."""


class ChildConfig(BaseModel):
    """What the parent tells its child."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    """Name in the entry-point group `lilo.backends`."""
    definition: Definition
    checkpoints_root: str
    epoch: int
    descriptors: dict[Channel, list[int]]
    """Inherited stream sockets, by channel."""


def main() -> None:
    """Read the config, build the trainer, serve it until told to close."""
    config = ChildConfig.model_validate_json(begin_child())
    streams: dict[Channel, list[socket.socket]] = {
        channel: [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for channel, descriptors in config.descriptors.items()
    }
    for members in streams.values():
        for stream in members:
            stream.set_inheritable(False)
    backend_config = BackendConfig(
        definition=config.definition, checkpoints_root=config.checkpoints_root, epoch=config.epoch
    )
    try:
        backend = find_backend(config.backend)(backend_config)
    except LiloError as error:
        # It says all there is to say; a traceback in the log would hide that.
        bridge_server.decline(streams, error.message)
        _end_lost(error.message)
    _log.info("backend %s is ready, epoch %d", config.backend, config.epoch)
    threading.Thread(target=_end_when_lost, args=(backend,), daemon=True).start()
    bridge_server.serve(backend, streams, epoch=config.epoch, on_lost=_end_lost)


def _end_when_lost(backend: Backend) -> None:
    """Nobody may be asking it anything when it is lost; whoever is gets its answer first."""
    cause = backend.wait_lost()
    time.sleep(ANSWER_S)
    _end_lost(cause)


def _end_lost(cause: str) -> NoReturn:
    """The trainer said that it is lost: the process ends, whatever its threads stand in.

    An answer that says so lies in the socket, where it outlives this process; the line in the log is for a loss that
    nobody was waiting to hear of.
    """
    _log.error("the trainer is lost: %s", cause)
    logging.shutdown()
    os._exit(LOST)


if __name__ == "__main__":
    main()
