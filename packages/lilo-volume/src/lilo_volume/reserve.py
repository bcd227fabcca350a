"""Reserve: room on the disk taken in large pieces before a long file is written into it. Linux only; elsewhere nothing.

Without it a file system sets room aside page by page, which costs a tenth of the time of writing, and the
pieces of files that several ranks write at once end up between each other.

`posix_fallocate` of the standard library is no good for this: where a file system cannot reserve, as over NFS, the C
library writes zeros instead.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable

PIECE_BYTES = 64 * 1024 * 1024
LEAST_BYTES = 4 * 1024 * 1024
"""Shorter files are not worth the calls."""
_KEEP_SIZE = 1
"""`FALLOC_FL_KEEP_SIZE`: what is reserved is not part of the file until it is written."""


class Reserve:
    """The room that one file has been given."""

    def __init__(self, descriptor: int) -> None:
        """Of the file open at `descriptor`; nothing is reserved yet."""
        self._descriptor = descriptor
        self._call = _fallocate() if sys.platform == "linux" else None
        self._end = 0

    def up_to(self, end: int) -> None:
        """Reserve what a write that ends at `end` needs, if the file system can; never raises."""
        if self._call is None or end < LEAST_BYTES or end <= self._end:
            return
        if self._call(self._descriptor, self._end, PIECE_BYTES) == 0:
            self._end += PIECE_BYTES
        else:
            # It cannot reserve, or not a whole piece: then the writes tell when there is no room.
            self._call = None

    def give_back(self, size: int) -> None:
        """Release what lies beyond the end of the file, which is `size` bytes long."""
        if self._end > size:
            os.ftruncate(self._descriptor, size)


@functools.cache
def _fallocate() -> Callable[[int, int, int], int] | None:
    """The system call: descriptor, offset, length to an error number; None where there is none."""
    try:
        ctypes = importlib.import_module("ctypes")
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def call(descriptor: int, offset: int, length: int) -> int:
        return 0 if function(descriptor, _KEEP_SIZE, offset, length) == 0 else ctypes.get_errno()

    return call
