"""Part: what all pieces of a definition have in common: frozen, strict, no unknown fields, documented per field.

Strict means that a value has the type it says: no `"6"` for 6, no `true` for 1. A definition is written once and read
by many; a value that had to be guessed at is a mistake of the writer.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Part(BaseModel):
    """Base of `Definition` and of everything inside it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        # A validator is built when it is first asked for: a command needs few, and each takes milliseconds.
        defer_build=True,
    )

    @classmethod
    def meanings(cls) -> Mapping[str, str]:
        """What each field means: the text under it, in one line.

        Read when somebody asks: pydantic's own reading of them takes longer than all else that a command does.
        """
        return _meanings(cls)


def misfit(field: str, message: str) -> PydanticCustomError:
    """The error of a check between fields, for a validator to raise.

    Args:
        field: the one to change, relative to the part that is checked, as `tp` or `pool.gpu`: its line is named.
        message: the values, what was expected, what to do.
    """
    return PydanticCustomError("misfit", "{message}", {"message": message, "field": field})


@cache
def _meanings(part: type[Part]) -> Mapping[str, str]:
    body = ast.parse(inspect.getsource(part)).body[0]
    assert isinstance(body, ast.ClassDef), f"{part} is written as a class"
    found: dict[str, str] = {}
    for field, text in pairwise(body.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found
