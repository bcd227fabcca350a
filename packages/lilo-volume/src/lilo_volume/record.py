"""Record: the note that an attempt leaves in its folder when it begins, so that leftovers tell what they were."""

from __future__ import annotations

import json
from typing import cast

from lilo_volume.publication import Publication


def encode_record(publication: Publication, world_size: int, begun_unix_ms: int) -> bytes:
    """The note as JSON. It is never needed to read a checkpoint.

    Every node puts the same bytes into its own view: whatever it commits later comes with its note.
    """
    record = {
        "format": 1,
        "collection": publication.collection,
        "kind": publication.kind,
        "name": publication.name,
        "order": publication.order,
        "attempt": publication.attempt,
        "world_size": world_size,
        "begun_unix_ms": begun_unix_ms,
    }
    return json.dumps(record, sort_keys=True).encode("ascii")


def begun_in(data: bytes) -> int | None:
    """When the attempt of a note began, in milliseconds of Unix time; None if the note does not say."""
    try:
        record: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    begun = (
        cast("dict[str, object]", record).get("begun_unix_ms") if isinstance(record, dict) else None
    )
    return begun if type(begun) is int else None
