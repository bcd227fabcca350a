"""The catalogue: name -> Definition, over everything that is installed.

Packages add definitions through the entry-point group `lilo.definitions`: each entry point is a mapping from a name to
a function without arguments that returns the `Definition` of that name. Ours is `BUILTIN`, and nobody else can take one
of its names. Nothing is built before it is asked for, so that listing names stays cheap and one broken definition does not
hide the others. A path to a file stands for a name wherever one is asked for (`yaml_file.py`, `python_file.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, cast

from lilo_definitions.definition import Definition
from lilo_definitions.errors import InvalidDefinition, UnknownDefinition
from lilo_definitions.families import qwen3, qwen3_5, smollm2
from lilo_definitions.families.tiny import tiny
from lilo_definitions.python_file import is_python_file, load_python
from lilo_definitions.recipe import build

FILE_SUFFIXES = (".yaml", ".yml")
"""What ends with one is a path, not a name."""
GROUP = "lilo.definitions"
"""The entry-point group that packages register in."""

Recipes: TypeAlias = Mapping[str, Callable[[], Definition]]
"""What an entry point of the group is: name -> function that builds the definition."""

BUILTIN: Recipes = MappingProxyType(
    {"tiny": tiny, **smollm2.RECIPES, **qwen3.RECIPES, **qwen3_5.RECIPES}
)
"""The definitions of this package."""


def names() -> tuple[str, ...]:
    """Every name that is installed, sorted.

    Raises:
        InvalidDefinition: an installed catalogue cannot be loaded, or two give the same name.
    """
    return tuple(sorted(_recipes()))


def get(name: str) -> Definition:
    """The definition of this name, of the YAML file at this path (`*.yaml`, `*.yml`), or of `FILE.py:FUNCTION`.

    Raises:
        UnknownDefinition: there is none; the message lists the nearest names.
        InvalidDefinition: it is installed, or a file, but does not hold.
    """
    if name.endswith(FILE_SUFFIXES):
        # Only files need a parser of YAML, and names are what is asked for nearly always.
        from lilo_definitions.yaml_file import load_file  # noqa: PLC0415

        return load_file(Path(name).expanduser(), get)
    if is_python_file(name):
        return load_python(name)
    # Looking through everything that is installed takes longer than building ours.
    recipes = BUILTIN if name in BUILTIN else _recipes()
    if name not in recipes:
        raise UnknownDefinition(_unknown(name, tuple(sorted(recipes))))
    definition = build(name, recipes[name])
    if definition.name != name:
        raise InvalidDefinition(
            f"definition {name!r} calls itself {definition.name!r}; the entry in the catalogue and the "
            "field `name` must be equal"
        )
    return definition


def _unknown(name: str, known: tuple[str, ...]) -> str:
    """The sentence for a miss: the nearest names first, all of them if none is near."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"there is no definition {name!r}; the nearest: {', '.join(near)}"
    return f"there is no definition {name!r}; there are: {', '.join(known) or 'none'}"


def _recipes() -> dict[str, Callable[[], Definition]]:
    """All recipes of all installed packages.

    Raises:
        InvalidDefinition: an entry point cannot be loaded, is no mapping, or repeats a name.
    """
    found: dict[str, Callable[[], Definition]] = {}
    givers: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        for name, recipe in _load(point).items():
            if name in found and found[name] is not recipe:
                raise InvalidDefinition(
                    f"the definition {name!r} is given by both {givers[name]} and {point.value}; "
                    "uninstall one, or rename it"
                )
            found[name], givers[name] = recipe, point.value
    return found


def _load(point: EntryPoint) -> Recipes:
    """The mapping behind one entry point."""
    try:
        loaded: object = point.load()
    except (ImportError, AttributeError) as error:
        raise InvalidDefinition(
            f"the catalogue {point.name!r} ({point.value}) cannot be loaded: {error}; "
            "reinstall or remove the package that brings it"
        ) from error
    if not isinstance(loaded, Mapping):
        raise InvalidDefinition(
            f"the catalogue {point.name!r} ({point.value}) is a {type(loaded).__name__}; "
            "expected a mapping from name to a function that returns a Definition"
        )
    return cast(Recipes, loaded)
