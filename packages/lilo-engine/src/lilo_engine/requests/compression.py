"""Content encodings of request bodies: identity and zstd, with a bound on what a body may grow to.

Called by `body.py` before anything is parsed. A frame's header may state its size or not; both are bounded
here, because a few kilobytes on the wire can stand for gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import zstandard

from lilo_engine.errors import InvalidRequest, TooLarge, UnsupportedMedia

_PIECE_BYTES = 256
"""Input fed at once to a frame of unstated size. The densest zstd block is 4 bytes for 128 KiB, so that one
piece overshoots the bound by at most 8 MiB before it is noticed."""
_MAX_WINDOW_BYTES = 1 << 27
"""Larger windows are only asked for by `--ultra --long` and would be allocated up front."""


def decompress(body: bytes, encoding: str, *, limit_bytes: int) -> bytes:
    """Undo `Content-Encoding`.

    Args:
        body: What came over the wire.
        encoding: The header's value; empty or `identity` for none.
        limit_bytes: Largest result that is accepted.

    Raises:
        UnsupportedMedia: the encoding is neither identity nor zstd.
        TooLarge: the result would be over the limit.
        InvalidRequest: the bytes are no zstd frame, or not a whole one.
    """
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case "zstd":
            return _zstd(body, limit_bytes)
        case other:
            raise UnsupportedMedia(
                f"content encoding {other!r} is not spoken here; send zstd, or no encoding"
            )


class Unpacking:
    """A body that is too large to keep, unpacked piece by piece; what cannot be unpacked is left out."""

    def __init__(self, encoding: str, *, limit_bytes: int) -> None:
        """Nothing was fed.

        Args:
            encoding: The `Content-Encoding`.
            limit_bytes: Nothing is unpacked after so much.
        """
        self._left_bytes = limit_bytes
        self._frame: zstandard.ZstdDecompressionObj | None = None
        if encoding.strip().lower() == "zstd":
            packer = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
            self._frame = packer.decompressobj()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """What a piece of the body unpacks to; of a few megabytes at most each."""
        if self._frame is None:
            yield piece
            return
        for start in range(0, len(piece), _PIECE_BYTES):
            if self._left_bytes <= 0 or self._frame.eof:
                return
            try:
                plain = self._frame.decompress(piece[start : start + _PIECE_BYTES])
            except zstandard.ZstdError:
                self._left_bytes = 0
                return
            self._left_bytes -= len(plain)
            yield plain


def _zstd(body: bytes, limit_bytes: int) -> bytes:
    try:
        stated = zstandard.frame_content_size(body)
        if stated > limit_bytes:
            raise TooLarge(_too_large(f"states {stated} bytes", limit_bytes))
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        if stated >= 0:
            return decompressor.decompress(body, max_output_size=limit_bytes)
        # Measured before any of it is kept: what is refused then costs no memory. A client that states the size, as
        # the SDK does, is spared the second time.
        for _ in _pieces(decompressor, body, limit_bytes):
            pass
        return b"".join(_pieces(decompressor, body, limit_bytes))
    except zstandard.ZstdError as error:
        raise InvalidRequest(
            f"the body is marked zstd but is not a whole zstd frame ({error}); send it again"
        ) from error


def _pieces(
    decompressor: zstandard.ZstdDecompressor, body: bytes, limit_bytes: int
) -> Iterator[bytes]:
    """A frame of unstated size, unpacked piece by piece.

    Raises:
        TooLarge: the pieces are over the limit together.
        InvalidRequest: the frame ends too early.
    """
    frame = decompressor.decompressobj()
    size = 0
    for start in range(0, len(body), _PIECE_BYTES):
        piece = frame.decompress(body[start : start + _PIECE_BYTES])
        size += len(piece)
        if size > limit_bytes:
            raise TooLarge(_too_large("grows beyond that", limit_bytes))
        yield piece
        if frame.eof:
            return
    raise InvalidRequest("the zstd frame of the body ends too early; send it again")


def _too_large(found: str, limit_bytes: int) -> str:
    return (
        f"a body may be {limit_bytes} bytes after decompression, this one {found}; "
        "send fewer data per request"
    )
