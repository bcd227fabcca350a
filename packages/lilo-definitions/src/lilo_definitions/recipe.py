"""build: run the Python function of a definition; what it does wrong becomes one line with its file and line.

A recipe may come from any installed package, so that any exception of it is somebody's mistake in a definition and not
a fault of the command that asked for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pydantic
from pydantic import ValidationError

from lilo_definitions import problems
from lilo_definitions.definition import Definition
from lilo_definitions.errors import DefinitionError, InvalidDefinition

Result = TypeVar("Result")

_HERE = Path(__file__).parent
_MACHINERY = (Path(pydantic.__file__).parent, *_HERE.glob("*.py"))
"""Frames in here are how a recipe is checked, not where it is written; `families/` holds recipes."""


def build(name: str, recipe: Callable[[], object]) -> Definition:
    """Call the recipe.

    Raises:
        InvalidDefinition: it raises, or returns something else; one line with file, line, field, value, and what is
            allowed.
    """
    definition = translated(name, recipe, _written_at(recipe))
    if not isinstance(definition, Definition):
        raise InvalidDefinition(
            f"{_written_at(recipe)}: definition {name!r} is a {type(definition).__name__}; "
            "its function must return a Definition"
        )
    return definition


def translated(name: str, call: Callable[[], Result], elsewhere: str) -> Result:
    """Call it; what it raises becomes an `InvalidDefinition` with the line of its own code.

    Args:
        name: of the definition, or of the file that holds it.
        call: a recipe, or the running of a file.
        elsewhere: `FILE:LINE` if no line of its own raised.
    """
    try:
        return call()
    except ValidationError as error:
        where = _raised_at(error) or elsewhere
        raise InvalidDefinition(problems.sentences(error, lambda _: where)) from error
    except DefinitionError:
        raise
    except SyntaxError as error:
        raise InvalidDefinition(
            f"{error.filename}:{error.lineno}: this is not Python: {error.msg}"
        ) from error
    except Exception as error:  # translated: a recipe is data of somebody else
        where = _raised_at(error) or elsewhere
        raise InvalidDefinition(
            f"{where}: definition {name!r} cannot be built: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _raised_at(error: BaseException) -> str | None:
    """The innermost line of the recipe's own code."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file not in _MACHINERY and not any(place in file.parents for place in _MACHINERY):
            return f"{file}:{frame.lineno}"
    return None


def _written_at(recipe: Callable[[], object]) -> str:
    """Where the function is defined."""
    code = getattr(recipe, "__code__", None)
    if code is None:
        return f"{type(recipe).__name__} {recipe!r}"
    return f"{code.co_filename}:{code.co_firstlineno}"
