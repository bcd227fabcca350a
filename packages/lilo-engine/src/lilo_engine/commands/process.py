"""Process: one backend child: started, watched, and ended, every wait bounded. Used by `launcher.py` only.

The child leads a session of its own, so that a Ctrl-C at the terminal reaches the server alone and a signal to the
group reaches every rank that the child started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from lilo_definitions import Definition

from lilo_engine.commands.bridge import CHANNELS, Channel, connections
from lilo_engine.commands.bridge_client import BridgeClient
from lilo_engine.commands.serve_backend import ChildConfig
from lilo_engine.log_tail import last_words

LEAVE_LIMIT_S = 2.0
"""From the end of its standard input until SIGTERM."""
TERMINATE_LIMIT_S = 2.0
"""From SIGTERM until SIGKILL."""
KILL_LIMIT_S = 5.0
"""From SIGKILL until we stop waiting: only a process stuck in the kernel takes longer."""


class BackendProcess:
    """A running child and the client of its bridge."""

    def __init__(
        self, child: subprocess.Popen[bytes], client: BridgeClient, log_path: Path, log_start: int
    ) -> None:
        self.client = client
        self._child = child
        self._log_path = log_path
        self._log_start = log_start
        self._stop = threading.Lock()

    @property
    def pid(self) -> int:
        """Of the child; also its session and process group."""
        return self._child.pid

    def wait(self) -> str:
        """Block until the child has ended; how, in words."""
        code = self._child.wait()
        # The reply in flight can never come now; waking its reader is quicker than its limit.
        cause = f"the backend process {self.pid} {describe_exit(code)}"
        self.client.fence(cause)
        return cause

    def last_words(self) -> str:
        """The last lines that this child wrote, for an error."""
        return last_words(self._log_path, self._log_start)

    def stop(self) -> None:
        """End the child and everything it started; blocks for at most the sum of the limits above."""
        with self._stop:
            self.client.close()
            if self._child.stdin is not None:
                with contextlib.suppress(OSError):
                    self._child.stdin.close()
            for number, limit_s in (
                (None, LEAVE_LIMIT_S),
                (signal.SIGTERM, TERMINATE_LIMIT_S),
                (signal.SIGKILL, KILL_LIMIT_S),
            ):
                if number is not None:
                    self._signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(limit_s)
                    break
            # Ranks may outlive their driver; they are in its group.
            self._signal(signal.SIGKILL)
            self.client.release()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


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
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_start = log_path.stat().st_size if log_path.exists() else 0
        child = _spawn(config, log_path)
    except OSError:
        _close(ours)
        raise
    finally:
        _close(theirs)
    client = BridgeClient(ours, epoch=epoch, limits=definition.limits)
    return BackendProcess(child, client, log_path, log_start)


def describe_exit(code: int) -> str:
    """An exit status in words: a negative one is a signal."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        return f"was ended by signal {-code} ({name})"
    return f"exited with code {code}"


def _close(streams: Mapping[Channel, Sequence[socket.socket]]) -> None:
    for members in streams.values():
        for stream in members:
            stream.close()


def _spawn(config: ChildConfig, log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log:
        child = subprocess.Popen(
            # -P: a file in the working directory must not stand in for a module.
            [sys.executable, "-P", "-m", "lilo_engine.commands.serve_backend"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[fd for members in config.descriptors.values() for fd in members],
        )
    assert child.stdin is not None
    try:
        child.stdin.write(config.model_dump_json().encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        # It ended already; whoever waits for it says how.
        pass
    return child
