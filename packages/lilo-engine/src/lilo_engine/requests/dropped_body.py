"""DroppedBody: which model and number a body is of that is too large to keep. Nothing of it is kept but these.

`body.py` feeds it in a thread with what it drops, as it was sent; `front.py` then uses up the number, since the client
would wait for ever behind one that is left out.
"""

from __future__ import annotations

from lilo_engine.requests import wire_protobuf
from lilo_engine.requests.body import START_BYTES
from lilo_engine.requests.compression import Unpacking
from lilo_engine.requests.identity_scan import IdentityScan


class DroppedBody:
    """One body; fed with its pieces in order."""

    def __init__(self, encoding: str, *, protobuf: bool, limit_bytes: int) -> None:
        """Nothing was dropped.

        Args:
            encoding: its `Content-Encoding`.
            protobuf: else JSON, which may have both at its end.
            limit_bytes: how much of it is unpacked at most.
        """
        self._unpacking = Unpacking(encoding, limit_bytes=limit_bytes)
        self._protobuf = protobuf
        self._head = bytearray()
        self._scan = IdentityScan()

    @property
    def identity(self) -> tuple[str, int] | None:
        """Model id and number; None if not both were found."""
        if self._protobuf:
            return wire_protobuf.identity_of(bytes(self._head))
        return self._scan.identity

    def feed(self, piece: bytes) -> None:
        """Read on."""
        if self._protobuf and len(self._head) >= START_BYTES:
            return
        for plain in self._unpacking.feed(piece):
            if not self._protobuf:
                self._scan.feed(plain)
                continue
            self._head += plain[: START_BYTES - len(self._head)]
            if len(self._head) >= START_BYTES:
                return
