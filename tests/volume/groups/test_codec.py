"""The codec: what crosses comes back equal; what does not is refused; bytes never choose what is run."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lilo_volume import FileEntry, Manifest, Publication, RankFailed, Receipt, Skipped, VolumeError
from lilo_volume.groups.codec import Undecodable, decode, encode, register

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_equal_and_of_the_same_types(value):
    back = decode(encode(value))
    assert back == value
    assert repr(back) == repr(value)


def test_a_manifest_comes_back_equal():
    manifest = Manifest(
        publication=Publication(collection="c", kind="k", name="n", order=1, attempt="a"),
        world_size=1,
        layout={"tp": 2},
        files=(FileEntry(path="a", size_bytes=1, algorithm="sha256", digest="0"),),
        receipts=(Receipt(rank=0, node="here", files=("a",)),),
        metadata={"!": "x"},
        created_unix_ms=5,
    )
    sent = (manifest, (Skipped(label="l", folder="f", why="w"),))
    assert decode(encode(sent)) == sent


@register
@dataclass(frozen=True)
class Registered:
    value: tuple[int, ...]


@dataclass(frozen=True)
class Unregistered:
    value: int


@dataclass
class Mutable:
    value: int


class Foreign(VolumeError):
    pass


def test_a_registered_dataclass_crosses_and_others_are_refused():
    assert decode(encode(Registered((1, 2)))) == Registered((1, 2))
    for value in (Unregistered(1), Mutable(1), Foreign("x"), object(), {1, 2}, 1j, print):
        with pytest.raises(TypeError):
            encode([value])
    with pytest.raises(AssertionError):
        register(Mutable)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b"\xff",
        b"{}",
        b'{"a": 1}',
        b'{"!": ["nothing", 1]}',
        b'{"!": ["bytes", "?"]}',
        b'{"!": ["dataclass", ["os:system", {"command": "true"}]]}',
        b'{"!": ["error", ["lilo_volume.errors:os", []]]}',
        b'{"!": ["error", ["lilo_volume.manifest:FileEntry", []]]}',
        b'{"!": ["dataclass", ["lilo_volume.volumes.local:LocalVolume", {"root": "/tmp"}]]}',
        b'{"!": ["dataclass", ["lilo_volume.manifest:FileEntry", {"path": "a"}]]}',
        b'{"!": ["dataclass", ["lilo_volume.cli:main", {}]]}',
        b"[" * 100_000,
        b'{"!": ["dataclass", []]}',
        b'{"!": ["dataclass", ["lilo_volume.manifest:FileEntry", 3]]}',
    ],
)
def test_bytes_that_are_no_value_are_refused(data):
    with pytest.raises(Undecodable):
        decode(data)


def test_an_error_comes_back_with_its_parts():
    error = RankFailed("c", 2, "node", "disk full")
    back = decode(encode(error))
    assert (type(back), back.args, back.rank) == (RankFailed, error.args, 2)


def test_data_that_looks_like_a_tag_is_data():
    value = {"!": ["error", ["lilo_volume.errors:VolumeError", []]]}
    assert decode(encode(value)) == value
    assert json.loads(encode(value)) != value
