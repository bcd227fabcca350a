"""Command: one process that prints a line when it is ready. Not a test; proofs use it too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
LILO = ("-c", "from lilo_engine.cli import main; main()")
_ENGINE = re.compile(r"^lilo: engine of \S+ at (?P<url>\S+), epoch (?P<epoch>\d+)$", re.M)
_FRONT = re.compile(r"^lilo: serving \S+ at (?P<url>\S+)$", re.M)
START_LIMIT_S = 120.0


class Command:
    """A running command; a context manager that kills it with all that it started."""

    def __init__(self, *arguments: str, ready: re.Pattern[str], env: Mapping[str, str]) -> None:
        """Start it; `wait_ready` waits."""
        self._ready = ready
        self._news = threading.Event()
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """What it printed until now."""
        return "".join(self._lines)

    @property
    def url(self) -> str:
        """Where it is reached; it must be ready."""
        return self._announced["url"]

    @property
    def epoch(self) -> int:
        """Of an engine that is ready."""
        return int(self._announced["epoch"])

    @property
    def _announced(self) -> re.Match[str]:
        found = self._ready.search(self.output)
        assert found is not None, self.output
        return found

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> Self:
        """Return when it said that it is ready."""
        assert self._news.wait(limit_s), f"not ready within {limit_s:g} s: {self.output}"
        assert self._ready.search(self.output), self.output
        return self

    def wait_end(self, limit_s: float) -> int:
        """Its exit code, when it ends by itself."""
        code = self.process.wait(limit_s)
        self._reader.join(5)
        return code

    def signal(self, number: int) -> None:
        """Send it a signal, and nothing to what it started."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """`kill -9`."""
        self.signal(signal.SIGKILL)
        self.process.wait(20)

    def stop(self) -> None:
        """Ask it to end, if it runs."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if self._ready.match(line):
                self._news.set()
        self._news.set()


def engine(data_dir: Path, url: str | None = None, *, in_memory: bool = False) -> Command:
    """`lilo engine tiny` on a free port, or the same with trainer and sampler in memory."""
    env = {} if url is None else {"LILO_RECORDS_URL": url}
    if in_memory:
        arguments = ("-m", "tests.processes.engine_in_memory", str(data_dir))
    else:
        arguments = (*LILO, "engine", "tiny", "--port", "0", "--data-dir", str(data_dir))
    return Command(*arguments, ready=_ENGINE, env=env)


def front(data_dir: Path, url: str | None = None, *, key: str, port: int = 0) -> Command:
    """`lilo front` that accepts a key, on a free port if none is given."""
    env = {"LILO_API_KEY": key} | ({} if url is None else {"LILO_RECORDS_URL": url})
    arguments = (*LILO, "front", "--port", str(port), "--data-dir", str(data_dir))
    return Command(*arguments, ready=_FRONT, env=env)
