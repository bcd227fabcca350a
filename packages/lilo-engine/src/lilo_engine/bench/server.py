"""Server: the measured server as a child process, and what it used of the machine. Linux only where it reads /proc."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

STOP_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServer:
    """A running one."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Processor seconds of the front and engine, without the backend's process."""
        return cpu_s(self.pid)

    def rss_bytes(self) -> int:
        """Resident memory of front and engine now."""
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """Largest resident memory since the last `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Begin the peak anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", "ascii")

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text("ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise LookupError(f"/proc has no {name}")


def cpu_s(pid: int) -> float:
    """Processor seconds of the living threads of a process, without its children."""
    # Nanoseconds of each thread; the ticks of `stat` are as long as several steps.
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text("ascii").split()[0]) for thread in threads) / 1e9


@contextmanager
def bench_server(*, slots: int) -> Generator[BenchServer]:
    """Start one on a folder of its own, and end it."""
    with TemporaryDirectory(prefix="lilo-bench-") as folder:
        command = [sys.executable, "-m", "lilo_engine.bench.serve", folder, str(slots)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            url = child.stdout.readline().strip()
            assert url.startswith("http://"), f"the measured server ended with {child.wait()}"
            yield BenchServer(url=url, pid=child.pid)
        finally:
            child.stdin.close()
            try:
                child.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
