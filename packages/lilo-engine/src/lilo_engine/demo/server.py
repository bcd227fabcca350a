"""A `lilo serve` of one's own: started as a child process, stopped again, whatever happens in between.

The demo, the proofs and the benchmark start their servers here. Not part of serving: the child is the ordinary
command line, and only its output and its exit code are used.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO, Self

START_TIMEOUT_S = 120.0
"""From starting the process until it serves: importing torch from a cold disk is most of it."""
STOP_TIMEOUT_S = 20.0
"""`lilo serve` promises to end within 15 s of SIGTERM; after this it is killed with its children."""
_SERVING = re.compile(r"^lilo: serving (?P<definition>\S+) at (?P<url>http\S+)")


class ServerFailed(RuntimeError):
    """The server ended or did not answer; the message carries the end of what it printed."""


class LocalServer:
    """One server on a free port of the loopback interface; a context manager.

    The data folder outlives it, so a second server on the same folder continues where the first one stopped; the
    API key lies in that folder (mode 0600) and stays the same. What it prints is added to `logs/server.log` there.
    """

    def __init__(self, definition: str, data_dir: Path) -> None:
        self.definition = definition
        self.data_dir = data_dir
        self.base_url = ""
        """Known once started."""
        self.api_key = _key_of(data_dir)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._serving = threading.Event()
        self._ended = threading.Event()
        self._last_lines: deque[str] = deque(maxlen=30)

    @property
    def pid(self) -> int:
        """Process id of the server; its backend and sampler are its children."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def output(self) -> str:
        """The last lines it printed."""
        return "\n".join(self._last_lines)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the process and return when it serves.

        Raises:
            ServerFailed: it ended before it served, or `timeout_s` passed; nothing is left running.
        """
        self._serving.clear()
        self._ended.clear()
        self._last_lines.clear()
        command = [sys.executable, "-c", "from lilo_engine.cli import main; main()", "serve"]
        command += [self.definition, "--host", "127.0.0.1", "--port", "0"]
        command += ["--data-dir", str(self.data_dir)]
        command += ["--api-key-file", str(self.data_dir / "api-key")]
        # A session of its own: Ctrl-C in the terminal reaches only us, and we stop the server in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None, "the output is a pipe"
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()
        try:
            served = self._serving.wait(timeout_s)
        except BaseException:
            self.kill()
            raise
        if not served or self._ended.is_set():
            self.kill()
            reason = "ended before it served" if served else f"did not serve within {timeout_s:g} s"
            raise ServerFailed(
                f"`lilo serve {self.definition}` {reason}; it printed:\n{self.output}"
            )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End the process in order, or by force after `timeout_s`; return its exit code. Idempotent."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        code = self._process.wait(timeout_s)
        if self._reader is not None:
            self._reader.join(timeout=5.0)
        return code

    def kill(self) -> None:
        """End the process without asking; children in other sessions see their parent go."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)

    def _read(self, stream: IO[str]) -> None:
        logs = self.data_dir / "logs"
        logs.mkdir(exist_ok=True)
        with stream, (logs / "server.log").open("a", encoding="utf-8") as log:
            for line in stream:
                log.write(line)
                log.flush()
                self._last_lines.append(line.rstrip("\n"))
                if match := _SERVING.match(line):
                    self.base_url = match["url"]
                    self._serving.set()
        self._ended.set()
        self._serving.set()  # whoever waits for it should look again


def _key_of(data_dir: Path) -> str:
    """The key in the data folder; a new one is drawn the first time."""
    data_dir.mkdir(parents=True, exist_ok=True)
    path = data_dir / "api-key"
    if path.exists():
        return path.read_text("ascii").strip()
    key = f"tml-{secrets.token_urlsafe(24)}"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    return key
