"""Locks: one publisher of a name at a time, over the threads and processes of one machine.

Not a lock between machines: there, one engine owns a collection. The kernel frees a lock when its holder dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

from lilo_volume.errors import LockTimeout

_RETRY_S = 0.005
"""Between tries for a lock held by another process: the kernel offers no wait with a limit."""
_guard = threading.Lock()
_threads: dict[str, threading.Lock] = {}


@contextlib.contextmanager
def exclusive_file(folder: Path, name: str, *, timeout_s: float) -> Generator[None]:
    """Hold the lock of `name` in `folder`. Names share 256 lock files, so that `folder` cannot grow.

    Raises:
        LockTimeout: the holder did not finish within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    path = str(folder / hashlib.sha256(name.encode("utf-8")).hexdigest()[:2])
    with _guard:
        lock = _threads.setdefault(path, threading.Lock())
    if not lock.acquire(timeout=timeout_s):
        raise _timeout(name, timeout_s)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise _timeout(name, timeout_s)
                time.sleep(_RETRY_S)
            yield
        finally:
            os.close(descriptor)
    finally:
        lock.release()


def _timeout(name: str, timeout_s: float) -> LockTimeout:
    return LockTimeout(f"another publisher holds {name!r}; it did not finish within {timeout_s} s")


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
