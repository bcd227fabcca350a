"""Definitions of the user in a Python file, without a package around it: `FILE.py:FUNCTION`, or `FILE.py` with one recipe.

The file is run, as a package's would be. What it does wrong is one line with its file and line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import cast

from lilo_definitions.definition import Definition
from lilo_definitions.errors import InvalidDefinition
from lilo_definitions.recipe import build, translated

_FORM = re.compile(r"(?P<file>.+\.py)(?::(?P<function>\w+))?")
_MODULE = "lilo_user_definitions"
"""Name under which a file is run; never entered into `sys.modules`, so that two files do not meet."""


def is_python_file(name: str) -> bool:
    """Whether what a person typed is a file of ours and not a name of the catalogue."""
    return _FORM.fullmatch(name) is not None


def load_python(name: str) -> Definition:
    """The definition that a function of a Python file returns.

    Args:
        name: `FILE.py:FUNCTION`; `FILE.py` alone if its RECIPES has one entry.

    Raises:
        InvalidDefinition: the file cannot be run, has no such function, or the function's definition does not hold.
    """
    match = _FORM.fullmatch(name)
    assert match is not None, f"{name} is no Python file"
    path = Path(match["file"]).expanduser()
    recipes = _recipes(path)
    wanted: str | None = match["function"] or (next(iter(recipes)) if len(recipes) == 1 else None)
    if wanted is None or wanted not in recipes:
        there = ", ".join(sorted(recipes)) or "none"
        asked = f"there is no recipe {wanted!r}" if wanted else "it does not say which recipe"
        raise InvalidDefinition(
            f"{path}:1: {asked}; name one as {path.name}:NAME; there are: {there}"
        )
    return build(wanted, recipes[wanted])


def _recipes(path: Path) -> Mapping[str, Callable[[], object]]:
    """RECIPES of the file, or else the functions that it defines itself."""
    module = translated(str(path), lambda: _run(path), str(path))
    given: object = getattr(module, "RECIPES", None)
    if isinstance(given, Mapping):
        return cast("Mapping[str, Callable[[], object]]", given)
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == _MODULE
        and callable(value)
    }


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidDefinition(f"{path} cannot be read: there is no such file")
    spec = spec_from_file_location(_MODULE, path)
    assert spec is not None, f"{path} ends with .py"
    assert spec.loader is not None, f"{path} ends with .py"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
