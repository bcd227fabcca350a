"""Part: what all pieces of a definition have in common: frozen, strict, no unknown fields, documented per field.

Strict means that a value has the type it says: no `"6"` for 6, no `true` for 1. A definition is written once and read
by many; a value that had to be guessed at is a mistake of the writer.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Base of `Definition` and of everything inside it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
