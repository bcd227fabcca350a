"""Manifests: what was written is read, and nothing else is."""

import hashlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lilo_volume import FileEntry, Manifest, ManifestInvalid, Publication, Receipt
from lilo_volume.manifest import MAX_BYTES, parse

TEXT = st.text(st.characters(), max_size=12)
NAMES = st.lists(st.text("abcdefgh_", min_size=1, max_size=8), min_size=1, max_size=5, unique=True)


@st.composite
def manifests(draw) -> Manifest:
    names = sorted(draw(NAMES))
    world_size = draw(st.integers(1, 4))
    owners = [draw(st.integers(0, world_size - 1)) for _ in names]
    return Manifest(
        publication=Publication(
            collection=draw(TEXT),
            kind=draw(TEXT),
            name=draw(TEXT),
            order=draw(st.integers(-5, 2**40)),
            attempt="00ff",
        ),
        world_size=world_size,
        layout=draw(st.dictionaries(st.sampled_from(["tp", "dp"]), st.integers(1, 8))),
        files=tuple(
            FileEntry(
                path=name,
                size_bytes=draw(st.integers(0, 2**50)),
                algorithm="sha256",
                digest="0" * 64,
            )
            for name in names
        ),
        receipts=tuple(
            Receipt(
                rank=rank,
                node=draw(TEXT),
                files=tuple(n for n, owner in zip(names, owners, strict=True) if owner == rank),
            )
            for rank in range(world_size)
        ),
        metadata=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        created_unix_ms=draw(st.integers(0, 2**42)),
    )


SMALL = Manifest(
    publication=Publication(collection="c", kind="k", name="n", order=1, attempt="a"),
    world_size=1,
    layout={"tp": 1},
    files=(FileEntry(path="f", size_bytes=1, algorithm="sha256", digest="ab"),),
    receipts=(Receipt(rank=0, node="here", files=("f",)),),
    metadata={"Key": "Value"},
    created_unix_ms=5,
)


@given(manifests())
def test_a_manifest_comes_back_equal_and_its_bytes_are_canonical(manifest):
    data = manifest.to_bytes()
    assert parse(data) == manifest
    assert parse(data).to_bytes() == data


def test_any_flipped_bit_of_a_manifest_is_refused():
    data = SMALL.to_bytes()
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            with pytest.raises(ManifestInvalid):
                parse(bytes(changed))


@given(manifests(), st.data())
def test_a_cut_or_lengthened_manifest_is_refused(manifest, data):
    whole = manifest.to_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:cut], whole + b" ", b"\n" + whole, whole + whole):
        with pytest.raises(ManifestInvalid):
            parse(broken)


@given(
    st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "ignore"))
)
@example(b"[" * 200_000)
@example(b'{"format":' + b"9" * 10_000 + b"}")
@example(b'{"format":NaN}')
@example(b'{"format":1e9}')
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(ManifestInvalid):
        parse(data)


def sealed(**changes: object) -> bytes:
    """A manifest with fields changed by somebody who knows how to compute the digest."""
    body = json.loads(SMALL.to_bytes())
    del body["digest"]
    for key, value in changes.items():
        if value is ...:
            del body[key]
        else:
            body[key] = value
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["digest"] = hashlib.sha256(text).hexdigest()
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def file(path: object, size: object = 1) -> dict[str, object]:
    return {"path": path, "size_bytes": size, "algorithm": "sha256", "digest": "ab"}


def receipt(*files: str, rank: int = 0) -> dict[str, object]:
    return {"rank": rank, "node": "here", "files": list(files)}


def test_the_forger_of_these_tests_can_seal_a_good_manifest():
    assert parse(sealed()) == SMALL


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../f",
        "a/../../f",
        "a\\b",
        "",
        ".",
        "manifest.json",
        "Attempt.json",
        "a\nb",
        7,
        None,
    ],
)
def test_a_hostile_file_path_is_refused_though_the_digest_is_right(path):
    with pytest.raises(ManifestInvalid):
        parse(sealed(files=[file(path)], receipts=[receipt(str(path))]))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 0},
        {"format": 2},
        {"format": True},
        {"files": []},
        {"files": [file("f"), file("F")], "receipts": [receipt("f", "F")]},
        {"files": [file("f", -1)]},
        {"files": [file("f", True)]},
        {"files": [file("f", 2**63)]},
        {"files": [file("f") | {"extra": 1}]},
        {"receipts": []},
        {"receipts": [receipt("f"), receipt("f", rank=1)]},
        {"receipts": [receipt("g")]},
        {"receipts": [receipt("f", rank=1)]},
        {"world_size": 0},
        {"world_size": 2},
        {"world_size": "1"},
        {"layout": {"tp": -1}},
        {"metadata": {"a": 1}},
        {"metadata": ["a"]},
        {"publication": {}},
        {"publication": ...},
        {"created_unix_ms": ...},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_manifest_that_contradicts_itself_is_refused_though_the_digest_is_right(changes):
    with pytest.raises(ManifestInvalid):
        parse(sealed(**changes))


def test_a_key_given_twice_is_refused():
    with pytest.raises(ManifestInvalid):
        parse(SMALL.to_bytes().replace(b'"format":1', b'"format":1,"format":1'))


def test_a_huge_manifest_is_refused_unread():
    with pytest.raises(ManifestInvalid):
        parse(bytes(MAX_BYTES + 1))
