"""IdentityScan: the model id and the number of a JSON body that is too large to keep, found while it is read and dropped.

Older clients write both after their data, so that the first bytes do not have them. Only the fields at the top of the
object count. Nothing is kept but the text of one short field; texts, brackets and braces are found by regular
expressions, numbers are not looked at.
"""

from __future__ import annotations

import json
import re

MAX_MARKS = 1_000_000
"""Texts, brackets and braces that are looked at, a microsecond each: many times what honest data of 64 MB have."""
_KEPT_BYTES = 512
"""Of one text or number at the top; longer ones are no ids."""

_TOP = re.compile(rb'["{}\[\]:,]')
_BELOW = re.compile(rb'["{}\[\]]')
_TEXT_ENDS = re.compile(rb'["\\]')


class IdentityScan:
    """Of one body; fed with its pieces in order."""

    def __init__(self) -> None:
        """Nothing was read."""
        self._fields: dict[str, str] = {}
        self._depth = 0
        self._marks = 0
        self._in_text = False
        self._escaped = False
        """The last byte was a backslash inside a text."""
        self._key = ""
        self._kept = bytearray()
        """What was read of the present key or value at the top."""

    @property
    def identity(self) -> tuple[str, int] | None:
        """Model id and number; None as long as not both were read."""
        model_id, seq_id = (
            _value(self._fields.get("model_id", "")),
            _value(self._fields.get("seq_id", "")),
        )
        if isinstance(model_id, str) and type(seq_id) is int and abs(seq_id) < 2**31:
            return model_id, seq_id
        return None

    def feed(self, piece: bytes) -> None:
        """Read on."""
        at = 0
        while at < len(piece) and self._marks < MAX_MARKS:
            at = self._text(piece, at) if self._in_text else self._outside(piece, at)

    def _text(self, piece: bytes, at: int) -> int:
        """Read to the end of a text, or of the piece."""
        if self._escaped:
            self._escaped = False
            self._keep(piece, at, at + 1)
            return at + 1
        found = _TEXT_ENDS.search(piece, at)
        end = len(piece) if found is None else found.end()
        self._keep(piece, at, end)
        if found is not None:
            self._marks += 1
            self._escaped = found.group() == b"\\"
            self._in_text = self._escaped
        return end

    def _outside(self, piece: bytes, at: int) -> int:
        """Read to the next mark, or to the end of the piece."""
        found = (_TOP if self._depth == 1 else _BELOW).search(piece, at)
        if found is None:
            self._keep(piece, at, len(piece))
            return len(piece)
        self._marks += 1
        self._keep(piece, at, found.start())
        self._mark(found.group())
        return found.end()

    def _mark(self, mark: bytes) -> None:
        match mark:
            case b'"':
                self._in_text = True
                self._keep(b'"', 0, 1)
            case b":":
                key = _value(self._kept.decode("utf-8", "replace"))
                self._key = key if isinstance(key, str) else ""
                self._kept.clear()
            case b",":
                self._end_field()
            case b"{" | b"[":
                self._depth += 1
                self._kept.clear()
            case _:
                if self._depth == 1:
                    self._end_field()
                self._depth -= 1
                self._kept.clear()

    def _end_field(self) -> None:
        if self._key in ("model_id", "seq_id"):
            self._fields[self._key] = self._kept.decode("utf-8", "replace")
        self._key = ""
        self._kept.clear()

    def _keep(self, piece: bytes, start: int, end: int) -> None:
        if self._depth == 1 and len(self._kept) < _KEPT_BYTES:
            self._kept += piece[start : min(end, start + _KEPT_BYTES)]


def _value(text: str) -> object:
    """A text or a number as JSON has it; None if it is neither."""
    try:
        return json.loads(text)
    except ValueError:
        return None
