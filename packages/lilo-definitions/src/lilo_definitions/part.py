"""Part: what all pieces of a definition have in common: frozen, strict, no unknown fields, documented per field.

Strict means that a value has the type it says: no `"6"` for 6, no `true` for 1. A definition is written once and read
by many; a value that had to be guessed at is a mistake of the writer.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Part(BaseModel):
    """Base of `Definition` and of everything inside it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def misfit(field: str, message: str) -> PydanticCustomError:
    """The error of a check between fields, for a validator to raise.

    Args:
        field: the one to change, relative to the part that is checked, as `tp` or `pool.gpu`: its line is named.
        message: the values, what was expected, what to do.
    """
    return PydanticCustomError("misfit", "{message}", {"message": message, "field": field})
