"""RayProcess: Ray's processes of one machine, held by one child that ends them whenever we end, however we do.

    we --standard input--> holder (main of this module) --> `ray start --block` --> gcs, raylet, workers

`ray start` in its usual form leaves processes behind that only `ray stop` finds, which ends those of everybody on the
machine. With `--block` they end with it, and the holder ends it when its standard input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

TERMINATE_LIMIT_S = 2.0
"""From SIGTERM until SIGKILL, with which the kernel ends what Ray started as well: Ray itself would wait 30 s for work
that is none of ours."""
STARTED = b"Ray runtime started"
"""In the output of `ray start`, once this machine belongs to the cluster."""
STOP_LIMIT_S = 6.0
"""From the end of the holder's standard input until it is killed."""


class RayProcess(Protocol):
    """Ray on this machine."""

    def has_started(self) -> bool:
        """Whether it said that this machine belongs to a cluster."""
        ...

    def exit_code(self) -> int | None:
        """Its exit code once it has ended."""
        ...

    def stop(self) -> None:
        """End it; bounded; nothing to end is no error."""
        ...


class StartRay(Protocol):
    """What runs `ray start`."""

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> RayProcess:
        """Start it, with variables added to ours.

        Raises:
            OSError: it cannot be run.
        """
        ...


class HeldRay:
    """Implements `RayProcess`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the holder."""
        # env(1) adds to what this process has; only config.py reads that.
        variables = (f"{name}={value}" for name, value in environment.items())
        given = ["env", *variables, _beside_us(command[0]), *command[1:]]
        self._holder = subprocess.Popen(
            [sys.executable, "-P", "-m", "lilo_engine.cluster.ray_process", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A Ctrl-C at the terminal is for us, who then end it.
            start_new_session=True,
        )
        self._started = threading.Event()
        threading.Thread(target=self._read, name="ray-output", daemon=True).start()

    def has_started(self) -> bool:
        """Whether `ray start` said so."""
        return self._started.is_set()

    def exit_code(self) -> int | None:
        """Of `ray start`, which ends only when it fails or is told to."""
        return self._holder.poll()

    def stop(self) -> None:
        """Close the holder's standard input, and see that it ends."""
        if self._holder.stdin is not None:
            with contextlib.suppress(OSError):
                self._holder.stdin.close()
        try:
            self._holder.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._holder.pid, signal.SIGKILL)
            self._holder.wait()

    def _read(self) -> None:
        """Pass its output on to our standard error, and look for what it says of itself."""
        assert self._holder.stdout is not None
        with self._holder.stdout as output:
            for line in output:
                if STARTED in line:
                    self._started.set()
                sys.stderr.buffer.write(line)
                sys.stderr.flush()


def _beside_us(program: str) -> str:
    """The program of our own environment, which need not be on the PATH; else what the PATH has."""
    ours = Path(sys.executable).parent / program
    return str(ours) if ours.exists() else program


def main() -> None:
    """Run the command of the first argument until it ends or standard input does."""
    ray = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, args=(ray,), daemon=True).start()
    code = ray.wait()
    # A signal of its own would look like one of ours.
    sys.exit(code if code >= 0 else 128 - code)


def _end_with_parent(ray: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ray.terminate()
    try:
        ray.wait(TERMINATE_LIMIT_S)
    except subprocess.TimeoutExpired:
        ray.kill()


if __name__ == "__main__":
    main()
