"""Serve backend: main of the backend process: `python -m lilo_engine.commands.serve_backend`. Not for people.

Standard input brings one line of JSON (`ChildConfig`) and then stays open for as long as the parent lives: when it
ends, however the parent died, this process ends at once. The streams are inherited descriptors: they have no name,
so nobody else can connect.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

from lilo_definitions import Definition
from pydantic import BaseModel, ConfigDict

from lilo_engine.commands import bridge_server
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.bridge import Channel
from lilo_engine.commands.discovery import find_backend

_log = logging.getLogger(__name__)

ORPHANED = 3
"""Exit code when the parent is gone."""


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
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    config = ChildConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    streams: dict[Channel, list[socket.socket]] = {
        channel: [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for channel, descriptors in config.descriptors.items()
    }
    for members in streams.values():
        for stream in members:
            stream.set_inheritable(False)
    backend = find_backend(config.backend)(
        BackendConfig(
            definition=config.definition,
            checkpoints_root=config.checkpoints_root,
            epoch=config.epoch,
        )
    )
    _log.info("backend %s is ready, epoch %d", config.backend, config.epoch)
    bridge_server.serve(backend, streams, epoch=config.epoch)


def _end_with_parent(descriptor: int) -> None:
    """Block until the parent is gone; ranks that this process started must watch it in turn.

    It reads the bare descriptor: a lock of `sys.stdin` held by this thread would abort an orderly exit.
    """
    while os.read(descriptor, 4096):
        pass
    _log.warning("standard input ended: the parent is gone, or wants this to end")
    logging.shutdown()
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
