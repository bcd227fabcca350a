"""Medium: where an emulator keeps what it knows: bytes by token, and small tables that are locked while in use.

In memory for one process; as files for several, who then take turns by the kernel's file locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

Table: TypeAlias = dict[str, Any]
"""What JSON can hold."""


class Medium(Protocol):
    """The emulator's own storage; no part of what it emulates."""

    def locked(self, name: str) -> contextlib.AbstractContextManager[Table]:
        """The table `name`, held by the caller alone; changes are kept. Not reentrant."""
        ...

    def slot(self, count: int) -> contextlib.AbstractContextManager[None]:
        """One of `count` places; waits for one."""
        ...

    def put(self, data: bytes) -> str:
        """Keep `data`; returns its token."""
        ...

    def get(self, token: str) -> bytes:
        """What `put` was given."""
        ...


class MemoryMedium:
    """For the threads of one process."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._tables: dict[str, tuple[threading.Lock, Table]] = {}
        self._blobs: dict[str, bytes] = {}
        self._tokens = itertools.count()
        self._slots: dict[int, threading.BoundedSemaphore] = {}

    @contextlib.contextmanager
    def locked(self, name: str) -> Generator[Table]:
        """The table `name`, held by the caller alone."""
        with self._guard:
            lock, table = self._tables.setdefault(name, (threading.Lock(), {}))
        with lock:
            yield table

    @contextlib.contextmanager
    def slot(self, count: int) -> Generator[None]:
        """One of `count` places."""
        with self._guard:
            slots = self._slots.setdefault(count, threading.BoundedSemaphore(count))
        with slots:
            yield

    def put(self, data: bytes) -> str:
        """Keep `data`."""
        token = str(next(self._tokens))
        self._blobs[token] = data
        return token

    def get(self, token: str) -> bytes:
        """What was kept."""
        return self._blobs[token]


class FolderMedium:
    """For the processes of one machine that know the same folder."""

    def __init__(self, root: Path) -> None:
        """Use `root`, which is made if it is not there."""
        self._root = root
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        for name in ("tables", "blobs", "locks"):
            (root / name).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self, name: str) -> Generator[Table]:
        """The table `name`, held by the caller alone, over all processes."""
        place = self._root / "tables" / f"{name}.json"
        with self._exclusive(name):
            before = place.read_text(encoding="ascii") if place.exists() else "{}"
            table: Table = json.loads(before)
            try:
                yield table
            finally:
                after = json.dumps(table)
                if after != before:
                    temporary = place.with_suffix(".tmp")
                    temporary.write_text(after, encoding="ascii")
                    os.replace(temporary, place)

    @contextlib.contextmanager
    def slot(self, count: int) -> Generator[None]:
        """One of `count` places, over all processes."""
        for number in itertools.cycle(range(count)):
            descriptor = os.open(self._root / "locks" / f"slot-{number}", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                time.sleep(0.001)
                continue
            try:
                yield
            finally:
                os.close(descriptor)
            return

    def put(self, data: bytes) -> str:
        """Keep `data`."""
        token = os.urandom(8).hex()
        (self._root / "blobs" / token).write_bytes(data)
        return token

    def get(self, token: str) -> bytes:
        """What was kept."""
        return (self._root / "blobs" / token).read_bytes()

    @contextlib.contextmanager
    def _exclusive(self, name: str) -> Generator[None]:
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            descriptor = os.open(self._root / "locks" / name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
