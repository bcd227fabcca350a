"""Child: one process of ours that works behind a socket: started, watched, ended, every wait bounded. Blocking.

    we                                            child
    standard input, held open   ----------------> ends at once when it closes, however we ended
    sockets                     <---------------> inherited descriptors without a name: nobody else can connect
    its log                     <---------------- standard output and error, appended

It leads a session of its own, so that a Ctrl-C at the terminal reaches the server alone and a signal to the group
reaches all that it started. `process.py` runs the trainer in one, `sampling/launcher.py` the sampling engine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from lilo_engine.config import environment_of_children
from lilo_engine.log import begin_log
from lilo_engine.log_tail import complaint, last_words

_log = logging.getLogger(__name__)

LEAVE_LIMIT_S = 2.0
"""From the end of its standard input until SIGTERM."""
TERMINATE_LIMIT_S = 2.0
"""From SIGTERM until SIGKILL."""
KILL_LIMIT_S = 5.0
"""From SIGKILL until we stop waiting: only a process stuck in the kernel takes longer."""
ORPHANED = 3
"""Exit code of a child whose parent is gone."""


class Child:
    """A running process."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path, log_start: int) -> None:
        self._process = process
        self._log_path = log_path
        self._log_start = log_start
        self._ended = threading.Event()
        self._stop = threading.Lock()
        threading.Thread(target=self._reap, name=f"reaps {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Also of its session and process group."""
        return self._process.pid

    def wait(self, limit_s: float | None = None) -> bool:
        """Block until it has ended; False when the limit ran out before."""
        return self._ended.wait(limit_s)

    @property
    def exit(self) -> str | None:
        """How it ended, in words; None while it runs."""
        return describe_exit(self._process.returncode) if self._ended.is_set() else None

    def last_words(self) -> str:
        """The last lines that it wrote, as a clause that ends an error."""
        return last_words(self._log_path, self._log_start)

    def complaint(self) -> str:
        """What it said of its end, to append to how it ended; empty if it said nothing."""
        return complaint(self._log_path, self._log_start)

    def stop(self) -> None:
        """End it and everything it started; blocks for at most the sum of the limits above."""
        with self._stop:
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            for number, limit_s in (
                (None, LEAVE_LIMIT_S),
                (signal.SIGTERM, TERMINATE_LIMIT_S),
                (signal.SIGKILL, KILL_LIMIT_S),
            ):
                if number is not None:
                    self._signal(number)
                if self.wait(limit_s):
                    break
            else:
                _log.error("process %d does not end, not even by SIGKILL", self.pid)
            # What it started may outlive it; that is in its group.
            self._signal(signal.SIGKILL)

    def _reap(self) -> None:
        self._process.wait()
        self._ended.set()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def start_child(module: str, config: str, descriptors: Sequence[int], log_path: Path) -> Child:
    """Run `python -m module`, which reads one line of configuration; returns at once.

    Args:
        module: what it runs; it calls `begin_child` first of all.
        config: JSON without line breaks.
        descriptors: the child's ends of its sockets; they can be closed here afterwards.
        log_path: its output is appended there; the folder is made.

    Raises:
        OSError: it cannot be started, or the log cannot be written.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_start = log_path.stat().st_size if log_path.exists() else 0
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            # -P: a file in the working directory must not stand in for a module.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=descriptors,
            env=environment_of_children(),
        )
    assert process.stdin is not None
    child = Child(process, log_path, log_start)
    try:
        process.stdin.write(config.encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        _log.info("process %d ended before it was told what to do", process.pid)
    return child


def begin_child() -> str:
    """In the child: set up its log, end with its parent from now on, and return the configuration."""
    begin_log(logging.INFO)
    # A crash below Python leaves its stack in the log.
    faulthandler.enable()
    config = sys.stdin.buffer.readline().decode()
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    return config


def describe_exit(code: int) -> str:
    """An exit status in words: a negative one is a signal."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        return f"was ended by signal {-code} ({name})"
    return f"exited with code {code}"


def _end_with_parent(descriptor: int) -> None:
    """Block until the parent is gone; what this process started must watch it in turn.

    It reads the bare descriptor: a lock of `sys.stdin` held by this thread would abort an orderly exit.
    """
    while os.read(descriptor, 4096):
        pass
    _log.warning("standard input ended: the parent is gone, or wants this to end")
    logging.shutdown()
    os._exit(ORPHANED)
