"""Digest: the algorithms a file can be checked with. SHA-256 is always there; XXH3 comes with the extra `fast`.

The manifest names the algorithm per file. A reader that lacks one must say "unverifiable", never "fine".
XXH3 finds every accident; only SHA-256 also withstands somebody who builds another file of the same digest.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Protocol, cast

STANDARD = "sha256"
FAST = "xxh3_128"
"""Ten times the speed of SHA-256: at the rate of memory, not of a core."""


class Hasher(Protocol):
    """What is fed while a file is written or read."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take more bytes."""
        ...

    def hexdigest(self) -> str:
        """The digest so far, as lower-case hex."""
        ...


def best_algorithm() -> str:
    """What files are digested with unless the caller says otherwise: the fastest one that is installed."""
    return STANDARD if new_hasher(FAST) is None else FAST


def new_hasher(algorithm: str) -> Hasher | None:
    """A fresh hasher, or None if this process cannot compute `algorithm`."""
    if algorithm == STANDARD:
        return hashlib.sha256()
    if algorithm == FAST:
        try:
            xxhash = importlib.import_module("xxhash")
        except ImportError:
            return None
        return cast(Hasher, xxhash.xxh3_128())
    return None
