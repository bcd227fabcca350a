"""Manifest: the one small file whose presence makes a checkpoint exist, and what it promises about the others.

The bytes are canonical JSON with a digest of their own body, so that any change to them is seen. `parse` trusts
nothing: it is given bytes from a folder that anybody may have written to. Format: FORMAT.md, "Manifest".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lilo_volume.errors import InvalidPath, ManifestInvalid
from lilo_volume.fields import Fields, reject_constant, unique_keys
from lilo_volume.naming import check_relative, encode
from lilo_volume.publication import Publication

FORMAT = 1
"""What is written and read. Grows when a reader of the previous format could misread a manifest, or would refuse it;
from then on every released format stays readable."""
MANIFEST_NAME = "manifest.json"
RECORD_NAME = "attempt.json"
MAX_BYTES = 64 * 1024 * 1024
"""More is refused unread; a checkpoint of 100,000 files needs about 20 MB."""
_RESERVED_NAMES = frozenset({MANIFEST_NAME, f"{MANIFEST_NAME}.tmp", RECORD_NAME})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative to the attempt's folder."""
    size_bytes: int
    algorithm: str
    """Of `digest`, as `sha256`."""
    digest: str
    """Lower-case hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one rank says it wrote; also a rank that wrote nothing gives one."""

    rank: int
    node: str
    files: tuple[str, ...]
    """Paths, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that is known of a published checkpoint without opening its files."""

    publication: Publication
    world_size: int
    layout: Mapping[str, int]
    """Degrees by axis, as `{"tp": 2, "dp": 4}`."""
    files: tuple[FileEntry, ...]
    """Sorted by path."""
    receipts: tuple[Receipt, ...]
    """In rank order, one per rank."""
    metadata: Mapping[str, str]
    """The caller's; kept and never interpreted."""
    created_unix_ms: int
    """When it was published, by rank 0's clock, and always later than what it replaces."""
    expected: tuple[str, ...] = ()
    """The paths that were declared before, sorted: exactly those of `files`; empty if none were declared."""
    lineage: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where it comes from, as `parent`, `config`, `code`; the caller's, never interpreted."""

    @property
    def size_bytes(self) -> int:
        """Sum of the files."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def digest(self) -> str:
        """Self digest: SHA-256 of the canonical body, 64 hex digits."""
        return hashlib.sha256(_canonical(_body(self))).hexdigest()

    def to_bytes(self) -> bytes:
        """The canonical form; equal manifests give equal bytes."""
        body = _body(self)
        body["digest"] = hashlib.sha256(_canonical(body)).hexdigest()
        return _canonical(body)


def attempt_folder(publication: Publication) -> str:
    """Where the files of a publication lie, relative to the root."""
    return f"{name_folder(publication.collection, publication.kind, publication.name)}/{encode(publication.attempt)}"


def name_folder(collection: str, kind: str, name: str) -> str:
    """Where all attempts of one name lie, relative to the root."""
    return f"{encode(collection)}/{encode(kind)}/{encode(name)}"


def check_file_name(path: str) -> str:
    """Return `path` if a checkpoint may have a file of this name.

    Raises:
        InvalidPath: it leaves the folder, or is a name of lilo-volume's own files.
    """
    check_relative(path)
    if path.casefold() in _RESERVED_NAMES:
        raise InvalidPath(f"{path!r} is a file of lilo-volume itself; choose another name")
    return path


def parse(data: bytes) -> Manifest:
    """Read a manifest and believe it only if every byte is as it was written.

    Raises:
        ManifestInvalid: with the reason.
    """
    if len(data) > MAX_BYTES:
        raise ManifestInvalid(f"{len(data)} bytes; a manifest has at most {MAX_BYTES}")
    try:
        raw: Any = json.loads(
            data.decode("ascii"),
            object_pairs_hook=unique_keys,
            parse_constant=reject_constant,
            parse_float=reject_constant,
        )
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(f"not a JSON object in ASCII: {error}") from error
    top = Fields.of(raw, "manifest")
    version = top.integer("format")
    if version != FORMAT:
        raise ManifestInvalid(
            f"format {version}, this lilo-volume reads format {FORMAT}; a newer one may have written it"
        )
    claimed = top.text("digest")
    manifest = _read(top)
    if manifest.digest != claimed:
        raise ManifestInvalid(f"self digest is {manifest.digest}, the manifest claims {claimed}")
    if manifest.to_bytes() != data:
        raise ManifestInvalid("not in canonical form; it was changed after it was written")
    return manifest


def _read(top: Fields) -> Manifest:
    where = top.record("publication")
    publication = Publication(
        collection=where.text("collection"),
        kind=where.text("kind"),
        name=where.text("name"),
        order=where.integer("order", least=None),
        attempt=where.text("attempt"),
    )
    where.end()
    manifest = Manifest(
        publication=publication,
        world_size=top.integer("world_size", least=1),
        layout=top.integers("layout"),
        files=tuple(_read_file(item) for item in top.records("files")),
        receipts=tuple(_read_receipt(item) for item in top.records("receipts")),
        metadata=top.texts("metadata"),
        created_unix_ms=top.integer("created_unix_ms"),
        expected=top.text_list("expected"),
        lineage=top.texts("lineage"),
    )
    top.end()
    _check(manifest)
    return manifest


def _read_file(item: Fields) -> FileEntry:
    entry = FileEntry(
        path=item.text("path"),
        size_bytes=item.integer("size_bytes"),
        algorithm=item.text("algorithm"),
        digest=item.text("digest"),
    )
    item.end()
    return entry


def _read_receipt(item: Fields) -> Receipt:
    receipt = Receipt(
        rank=item.integer("rank"), node=item.text("node"), files=item.text_list("files")
    )
    item.end()
    return receipt


def _check(manifest: Manifest) -> None:
    """Check what fields say about each other."""
    paths = [entry.path for entry in manifest.files]
    for path in paths:
        try:
            check_file_name(path)
        except InvalidPath as error:
            raise ManifestInvalid(f"files: {error}") from error
    if not paths:
        raise ManifestInvalid("files: there are none; a checkpoint has at least one")
    if len({path.casefold() for path in paths}) != len(paths):
        raise ManifestInvalid("files: two have the same path, or differ only in case")
    if manifest.expected and list(manifest.expected) != sorted(paths):
        raise ManifestInvalid("expected: these are not the paths of the files")
    ranks = [receipt.rank for receipt in manifest.receipts]
    if ranks != list(range(manifest.world_size)):
        raise ManifestInvalid(
            f"receipts: of ranks {ranks[:8]}, expected 0 to {manifest.world_size - 1}"
        )
    if sorted(path for receipt in manifest.receipts for path in receipt.files) != sorted(paths):
        raise ManifestInvalid("receipts: they do not add up to the files")


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode(
        "ascii"
    )


def _body(manifest: Manifest) -> dict[str, Any]:
    publication = manifest.publication
    return {
        "format": FORMAT,
        "publication": {
            "collection": publication.collection,
            "kind": publication.kind,
            "name": publication.name,
            "order": publication.order,
            "attempt": publication.attempt,
        },
        "world_size": manifest.world_size,
        "layout": dict(manifest.layout),
        "files": [
            {
                "path": entry.path,
                "size_bytes": entry.size_bytes,
                "algorithm": entry.algorithm,
                "digest": entry.digest,
            }
            for entry in manifest.files
        ],
        "receipts": [
            {"rank": receipt.rank, "node": receipt.node, "files": list(receipt.files)}
            for receipt in manifest.receipts
        ],
        "metadata": dict(manifest.metadata),
        "created_unix_ms": manifest.created_unix_ms,
        "expected": list(manifest.expected),
        "lineage": dict(manifest.lineage),
    }
