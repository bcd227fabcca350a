"""The digest of a definition: equal content, equal digest, on every machine and Python version.

Used to notice that a running deployment was started from another version of a definition. Not a fingerprint of the
weights: the model counts by its source, not by its bytes.
"""

from __future__ import annotations

import hashlib
import json

from lilo_definitions.definition import Definition


def canonical_json(definition: Definition) -> bytes:
    """One line of JSON with sorted keys, ASCII only, defaults written out."""
    content = definition.model_dump(mode="json")
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest(definition: Definition) -> str:
    """The SHA-256 of the canonical JSON, in hex (64 characters)."""
    return hashlib.sha256(canonical_json(definition)).hexdigest()
