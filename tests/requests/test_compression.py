"""Content encodings: what is accepted, what is refused, and what a bomb costs."""

from __future__ import annotations

import tracemalloc

import pytest
import zstandard
from lilo_engine.errors import InvalidRequest, TooLarge, UnsupportedMedia
from lilo_engine.requests.compression import decompress

LIMIT = 8 << 20


def packed(data: bytes, *, stated: bool) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=stated).compress(data)


def bomb_of_a_gibibyte(*, stated: bool) -> bytes:
    """Packed piece by piece, so that the test itself stays small."""
    packer = zstandard.ZstdCompressor(write_content_size=stated).compressobj(
        size=1 << 30 if stated else -1
    )
    zeros = bytes(1 << 24)
    return b"".join([*(packer.compress(zeros) for _ in range(64)), packer.flush()])


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("size", [0, 1, 300, LIMIT])
def test_a_frame_up_to_the_limit_is_unpacked(stated, size):
    data = bytes(size)
    assert decompress(packed(data, stated=stated), "zstd", limit_bytes=LIMIT) == data


@pytest.mark.parametrize("stated", [True, False])
def test_a_frame_over_the_limit_is_refused_within_three_times_the_limit_of_memory(stated):
    bomb = bomb_of_a_gibibyte(stated=stated)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decompress(bomb, "zstd", limit_bytes=LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 3 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stated", [True, False])
def test_a_frame_that_ends_early_is_refused(stated):
    whole = packed(b"abc" * 1000, stated=stated)
    with pytest.raises(InvalidRequest):
        decompress(whole[:-4], "zstd", limit_bytes=LIMIT)


def test_bytes_that_are_no_frame_are_refused():
    with pytest.raises(InvalidRequest):
        decompress(b"hello", "zstd", limit_bytes=LIMIT)


def test_no_encoding_changes_nothing_and_an_unknown_one_is_refused():
    assert decompress(b"x", "", limit_bytes=LIMIT) == b"x"
    assert decompress(b"x", "identity", limit_bytes=LIMIT) == b"x"
    with pytest.raises(UnsupportedMedia):
        decompress(b"x", "gzip", limit_bytes=LIMIT)
