"""Model and number of bodies that are too large to keep, packed or not, and what a bomb costs."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
import zstandard
from lilo_engine.requests.dropped_body import DroppedBody
from lilo_engine.requests.proto import tinker_public_pb2 as pb

LIMIT = 64 << 20


def found(body: bytes, *, protobuf: bool, packed: bool, piece_bytes: int) -> object:
    content = zstandard.ZstdCompressor().compress(body) if packed else body
    dropped = DroppedBody("zstd" if packed else "", protobuf=protobuf, limit_bytes=LIMIT)
    for start in range(0, len(content), piece_bytes):
        dropped.feed(content[start : start + piece_bytes])
    return dropped.identity


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("piece_bytes", [7, 300, 1 << 20])
def test_both_are_found_whatever_the_encoding_and_the_pieces(packed, piece_bytes):
    own = {"model_id": "s:train:0", "seq_id": 7}
    late = json.dumps({"data": [[1, {"seq_id": 3}]] * 3000, **own}).encode()
    message = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=7)
    for _ in range(300):
        message.data.add().model_input.add().encoded_text.tokens = b"\x01\x00\x00\x00" * 20
    binary = message.SerializeToString()
    for body, protobuf in ((late, False), (binary, True)):
        told = found(body, protobuf=protobuf, packed=packed, piece_bytes=piece_bytes)
        assert told == ("s:train:0", 7)


def test_bytes_that_cannot_be_unpacked_name_nothing():
    for protobuf in (False, True):
        dropped = DroppedBody("zstd", protobuf=protobuf, limit_bytes=LIMIT)
        dropped.feed(b"no frame at all" * 100)
        assert dropped.identity is None


@pytest.mark.parametrize("protobuf", [False, True])
def test_a_bomb_costs_a_moment_and_a_piece_of_memory(protobuf):
    packer = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(1 << 24)
    bomb = b"".join([*(packer.compress(zeros) for _ in range(64)), packer.flush()])
    dropped = DroppedBody("zstd", protobuf=protobuf, limit_bytes=LIMIT)
    tracemalloc.start()
    began = time.process_time()
    try:
        dropped.feed(bomb)
        assert tracemalloc.get_traced_memory()[1] < LIMIT / 2
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 2
    assert dropped.identity is None
