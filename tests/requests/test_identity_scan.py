"""Model id and number of a JSON body, found in pieces, wherever they stand and whatever else is there."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_engine.requests.identity_scan import MAX_MARKS, IdentityScan

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["model_id", "seq_id", "data", 'a"b', "\\"]), inner)
    ),
    max_leaves=12,
)


def scan(data: bytes, piece_bytes: int) -> tuple[str, int] | None:
    scanned = IdentityScan()
    for start in range(0, len(data), piece_bytes):
        scanned.feed(data[start : start + piece_bytes])
    return scanned.identity


@settings(max_examples=60, deadline=None)
@given(
    fields=st.dictionaries(st.text(max_size=6), VALUES, max_size=5),
    model_id=st.text(max_size=12),
    seq_id=st.integers(-(2**31) + 1, 2**31 - 1),
    first=st.booleans(),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
    piece_bytes=st.integers(1, 40),
)
def test_both_are_found_like_a_parser_finds_them(
    fields, model_id, seq_id, first, ascii_only, indent, piece_bytes
):
    own = {"model_id": model_id, "seq_id": seq_id}
    rest = {key: value for key, value in fields.items() if key not in own}
    body = {**own, **rest} if first else {**rest, **own}
    text = json.dumps(body, ensure_ascii=ascii_only, indent=indent)
    assert scan(text.encode("utf-8", "replace"), piece_bytes) == (model_id, seq_id)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1, 2]",
        b"not json at all",
        b'{"model_id": "m"}',
        b'{"model_id": 1, "seq_id": 2}',
        b'{"model_id": "m", "seq_id": "1"}',
        b'{"model_id": "m", "seq_id": true}',
        b'{"model_id": "m", "seq_id": 1.0}',
        b'{"model_id": "m", "seq_id": 99999999999}',
        b'{"a": {"model_id": "m", "seq_id": 1}}',
        b'{"a": "\\"model_id\\": \\"m\\", \\"seq_id\\": 1"}',
        b"]]]}}}" * 100,
    ],
)
def test_what_has_not_both_at_the_top_has_none(body):
    assert scan(body, 7) is None


def test_long_texts_and_endless_brackets_cost_neither_memory_nor_time():
    scanned = IdentityScan()
    scanned.feed(b'{"model_id": "')
    for _ in range(200):
        scanned.feed(b"x" * 65536)
    began = time.process_time()
    for _ in range(2 * MAX_MARKS // 65536):
        scanned.feed(b'"' * 65536)
    for _ in range(1000):
        scanned.feed(b"[" * 65536)
    assert time.process_time() - began < 10
    assert scanned.identity is None
