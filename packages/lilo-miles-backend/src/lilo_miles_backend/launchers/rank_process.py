"""Rank process: main of one spawned rank: `python -m lilo_miles_backend.launchers.rank_process`. Not for people.

Standard input brings one line of JSON (`RankConfig`); mailboxes are inherited sockets, which have no name, so that
nobody else can connect. When the driver is gone, however it ended, its end of them closes and this process ends.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

from lilo_engine.commands.connection import Connection
from lilo_engine.commands.frames import FrameError

from lilo_miles_backend.launchers.host import RankHost
from lilo_miles_backend.launchers.rank_config import RankConfig

_log = logging.getLogger(__name__)

ORPHANED = 3
"""Exit code when the driver is gone."""


def main() -> None:
    """Serve the mailboxes until the driver is gone."""
    config = RankConfig.model_validate_json(sys.stdin.buffer.readline())
    form = f"%(asctime)s %(levelname)s rank {config.place.rank} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    host = RankHost(config.backend, config.settings, config.place)
    train, *others = [
        Connection(_own(descriptor))
        for descriptors in sorted(config.descriptors.items(), key=lambda item: item[0] != "train")
        for descriptor in descriptors[1]
    ]
    for connection in others:
        threading.Thread(target=_serve, args=(host, connection), daemon=True).start()
    # Training stays on the main thread: devices and compilers want one.
    _serve(host, train)


def _own(descriptor: int) -> socket.socket:
    stream = socket.socket(fileno=descriptor)
    stream.set_inheritable(False)
    return stream


def _serve(host: RankHost, connection: Connection) -> None:
    """Answer one connection; its end is the end of the process, for the driver is gone then."""
    try:
        while True:
            connection.send_frame(host.answer(connection.receive_frame(None)), None)
    except (OSError, EOFError, FrameError) as error:
        _log.info("the driver is gone, or wants this to end: %s", error)
    finally:
        # At once, whatever the other threads do: a rank in a collective would wait for one that is gone.
        logging.shutdown()
        os._exit(ORPHANED)


if __name__ == "__main__":
    main()
