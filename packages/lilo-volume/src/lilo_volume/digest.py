"""Digest: the algorithms a file can be checked with. SHA-256 is always there; XXH3 comes with the extra `fast`.

The manifest names the algorithm per file. A reader that lacks one must say "unverifiable", never "fine".
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Protocol, cast

DEFAULT = "sha256"


class Hasher(Protocol):
    """What is fed while a file is written or read."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take more bytes."""
        ...

    def hexdigest(self) -> str:
        """The digest so far, as lower-case hex."""
        ...


def new_hasher(algorithm: str) -> Hasher | None:
    """A fresh hasher, or None if this process cannot compute `algorithm`."""
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm == "xxh3_128":
        try:
            xxhash = importlib.import_module("xxhash")
        except ImportError:
            return None
        return cast(Hasher, xxhash.xxh3_128())
    return None
