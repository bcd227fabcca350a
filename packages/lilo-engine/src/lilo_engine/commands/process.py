"""Process: the trainer in a child and the client of its bridge. Used by `launcher.py` only."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from lilo_definitions import Definition

from lilo_engine.commands.bridge import CHANNELS, Channel, connections
from lilo_engine.commands.bridge_client import BridgeClient
from lilo_engine.commands.child import Child, start_child
from lilo_engine.commands.serve_backend import ChildConfig

EXIT_NEWS_LIMIT_S = 0.3
"""A broken connection and the news of the exit that broke it come within this of each other."""


class BackendProcess:
    """A running child and the client of its bridge."""

    def __init__(self, child: Child, client: BridgeClient) -> None:
        self.client = client
        self._child = child
        threading.Thread(target=self._watch, name=f"watches {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the child; also its session and process group."""
        return self._child.pid

    def wait_lost(self) -> str:
        """Block until it is of no use any more: the first cause, in words.

        That is what the trainer said of itself if it did, else how its process ended, else what broke the bridge.
        """
        cause = self.client.wait_lost()
        ended = self._child.wait(EXIT_NEWS_LIMIT_S)
        if not ended:
            return cause
        how = f"the backend process {self.pid} {self._child.exit}"
        if self.client.was_told:
            return f"{cause} ({how})"
        return f"{how}{self._child.complaint()}"

    def last_words(self) -> str:
        """The last lines that this child wrote, for an error."""
        return self._child.last_words()

    def stop(self) -> None:
        """End the child and everything it started; blocks for a few seconds at most."""
        self.client.close()
        self._child.stop()
        self.client.release()

    def _watch(self) -> None:
        self._child.wait()
        # The reply in flight can never come now; waking its reader is quicker than its limit.
        self.client.fence(f"the backend process {self.pid} {self._child.exit}")


def start_process(
    *, backend: str, definition: Definition, checkpoints_root: Path, log_path: Path, epoch: int
) -> BackendProcess:
    """Start a child; returns at once, the start-up is waited for in `client.describe()`.

    Raises:
        OSError: it cannot be started, or the log cannot be written.
    """
    ours: dict[Channel, list[socket.socket]] = {channel: [] for channel in CHANNELS}
    theirs: dict[Channel, list[socket.socket]] = {channel: [] for channel in CHANNELS}
    for channel, number in connections(definition.limits.publication_workers).items():
        for _ in range(number):
            our, their = socket.socketpair()
            ours[channel].append(our)
            theirs[channel].append(their)
    config = ChildConfig(
        backend=backend,
        definition=definition,
        checkpoints_root=str(checkpoints_root),
        epoch=epoch,
        descriptors={channel: [s.fileno() for s in members] for channel, members in theirs.items()},
    )
    descriptors = [fd for members in config.descriptors.values() for fd in members]
    try:
        child = start_child(
            "lilo_engine.commands.serve_backend", config.model_dump_json(), descriptors, log_path
        )
    except OSError:
        _close(ours)
        raise
    finally:
        _close(theirs)
    return BackendProcess(child, BridgeClient(ours, epoch=epoch, limits=definition.limits))


def _close(streams: Mapping[Channel, Sequence[socket.socket]]) -> None:
    for members in streams.values():
        for stream in members:
            stream.close()
