"""Lock files between hosts: held while their content goes on changing. For file systems that several hosts share.

The kernel's locks are no use there: some mounts refuse them, some keep them on one host without saying so. A lock
file is made with O_EXCL, which NFS does atomically since version 3; its holder rewrites it all the time. A waiter
that saw no change for a whole lease, by its own clock alone, takes the holder for dead and takes over.

This makes publishers take turns; it is no proof. A holder that was stopped for longer than a lease may wake up beside
its successor: what is published stays whole all the same, since nothing relies on this lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path

from lilo_volume.errors import LockTimeout
from lilo_volume.log import warn

LEASE_S = 30.0
"""Without a sign of life for this long, a holder is dead. Attribute caches of NFS hide changes for up to 3 s at
first and 60 s at most, but not from a reader that opens the file anew, as a waiter does."""
_RETRY_S = 0.05


@contextlib.contextmanager
def held_file(
    folder: Path, name: str, *, owner: str, timeout_s: float, lease_s: float = LEASE_S
) -> Generator[None]:
    """Hold the lock of `name` in `folder`, which exists; `owner` is told to whoever waits in vain.

    Raises:
        LockTimeout: the holder did not finish, or die, within `timeout_s`; OSError: the folder cannot be used.
    """
    path = folder / f"{hashlib.sha256(name.encode('utf-8')).hexdigest()[:32]}.lock"
    token = f"{owner} {os.urandom(8).hex()}"
    _acquire(path, name, token, timeout_s, lease_s)
    released = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, token, lease_s / 4, released), daemon=True)
    beat.start()
    try:
        yield
    finally:
        released.set()
        beat.join()
        if _content(path).startswith(token):
            path.unlink(missing_ok=True)


def _acquire(path: Path, name: str, token: str, timeout_s: float, lease_s: float) -> None:
    started = since = time.monotonic()
    seen = ""
    while not _create(path, token):
        now = time.monotonic()
        if (content := _content(path)) != seen:
            seen, since = content, now
        elif now - since > lease_s:
            _break(path, seen, token)
            since = now
        if now - started > timeout_s:
            holder = seen.rsplit(" ", 2)[0] or "somebody"
            raise LockTimeout(f"{holder} holds {name!r}; it did not finish within {timeout_s} s")
        time.sleep(_RETRY_S)


def _create(path: Path, token: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(f"{token} 0".encode())
    return True


def _content(path: Path) -> str:
    """What the lock says now; opening it anew makes NFS ask the server. Empty: there is none, or it is being made."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def _break(path: Path, seen: str, token: str) -> None:
    """Take a dead holder's lock away. Of several that try, one rename succeeds; a lock that changed is put back."""
    aside = path.with_name(f"{path.name}.{token.rsplit(' ', 1)[1]}")
    try:
        os.rename(path, aside)
    except OSError:
        return
    if _content(aside) != seen:
        with contextlib.suppress(OSError):
            os.link(aside, path)
    else:
        warn("took over the lock %s of a holder that gave no sign of life: %s", path, seen)
    aside.unlink(missing_ok=True)


def _beat(path: Path, token: str, interval_s: float, released: threading.Event) -> None:
    count = 0
    while not released.wait(interval_s):
        count += 1
        if not _content(path).startswith(token):
            warn("the lock %s was taken by another; it was held for too long without a sign", path)
            return
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.write(f"{token} {count}".encode())
