"""Naming: any text as one safe path component, and relative paths that cannot leave their folder.

An encoded component is lower-case ASCII, so that two names that differ only in case or in Unicode form never
meet on a file system that ignores such differences; it never starts with a dot, so that hidden files are never
checkpoints. Format: FORMAT.md, "Names".
"""

from __future__ import annotations

import functools
import hashlib
import re

from lilo_volume.errors import InvalidPath

MAX_COMPONENT = 200
"""Longest encoded component in characters; file systems take 255, and suffixes such as `.tmp` need room."""

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
_WELL_FORMED = re.compile(r"(?:[a-z0-9_.-]|=[0-9a-f]{2})*")
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|$)")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")
_EMPTY = "=e"
_HASHED = re.compile(r".*=h[0-9a-f]{40}", re.DOTALL)


@functools.lru_cache(maxsize=1024)
def encode(text: str) -> str:
    """Text as one path component: `[a-z0-9_.-]` stays, every other UTF-8 byte becomes `=xx`.

    What would be longer than `MAX_COMPONENT` is cut and ends with `=h` and 40 digits of its SHA-256.
    """
    if not text:
        return _EMPTY
    data = text.encode("utf-8", "surrogatepass")
    out = [chr(byte) if chr(byte) in _PLAIN else f"={byte:02x}" for byte in data]
    for i in (0, -1):
        if out[i] == ".":  # hidden, `..`, and trailing dots that some systems drop
            out[i] = "=2e"
    if _RESERVED.match(text.lower()) and len(out[0]) == 1:
        out[0] = f"={data[0]:02x}"
    encoded = "".join(out)
    if len(encoded) <= MAX_COMPONENT:
        return encoded
    kept = encoded[: MAX_COMPONENT - 42].rstrip("=")
    return f"{kept}=h{hashlib.sha256(data).hexdigest()[:40]}"


def decode(component: str) -> str | None:
    """The text of an encoded component; None if it was too long to be kept in it.

    Raises:
        InvalidPath: `encode` makes no such component.
    """
    if component == _EMPTY:
        return ""
    if _HASHED.fullmatch(component):
        return None
    text = None
    if _WELL_FORMED.fullmatch(component):
        raw = re.sub(r"=([0-9a-f]{2})", lambda m: chr(int(m[1], 16)), component).encode("latin-1")
        try:
            text = raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            text = None
    if text is None or encode(text) != component:
        raise InvalidPath(f"{component!r} is no encoded name; it was not made by lilo-volume")
    return text


def check_relative(path: str) -> str:
    """Return `path` if it is relative, with forward slashes, and stays below its folder.

    Raises:
        InvalidPath: it is absolute, empty, has `.` or `..` or empty parts, a backslash, a colon in a drive
            position, or a control character.
    """
    parts = path.split("/")
    bad = any(part in ("", ".", "..") for part in parts)
    if bad or _UNSAFE.search(path) or re.match(r"[A-Za-z]:", path):
        raise InvalidPath(
            f"{path!r} is no path inside a volume; expected parts joined by '/', without a leading '/', "
            "'.', '..', backslashes or control characters"
        )
    return path
