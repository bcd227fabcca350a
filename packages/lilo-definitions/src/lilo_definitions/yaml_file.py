"""Definitions of the user in YAML: `extends:` another one, change fields, be checked like ours, with lines in errors.

A file is a mapping with the fields of `Definition`, nested as in `lilo definitions show NAME --json`. `extends` names an
installed definition or another file (relative to this one); fields are laid over it, part by part. Without `name`, a
file's definition is called as the file is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lilo_definitions import problems
from lilo_definitions.definition import Definition, merged
from lilo_definitions.errors import DefinitionError, InvalidDefinition
from lilo_definitions.yaml_nodes import Marks, read_mapping

_SUFFIXES = (".yaml", ".yml")
_MAX_BYTES = 1_000_000
"""A definition has some sixty fields; a larger file is another file."""

_ByName = Callable[[str], Definition]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A file's content with that of everything it extends, and where each field was written."""

    content: Mapping[str, object]
    marks: Marks


def load_file(path: Path, by_name: _ByName) -> Definition:
    """The definition that a YAML file describes.

    Args:
        path: the file.
        by_name: from a name in `extends` to the installed definition.

    Raises:
        InvalidDefinition: it cannot be read or does not hold; one line that names file, line, field, value, and what
            is allowed.
    """
    layer = _read(path, by_name, ())
    try:
        return Definition.model_validate(layer.content)
    except ValidationError as error:
        raise InvalidDefinition(
            problems.sentences(error, lambda field: _where(layer.marks, path, field))
        ) from None


def _where(marks: Marks, path: Path, field: problems.Path) -> str:
    """`FILE:LINE` of a field, else of the nearest part around it that the user wrote."""
    for length in range(len(field), -1, -1):
        if (mark := marks.get(field[:length])) is not None:
            return mark
    return f"{path}:1"


def _read(path: Path, by_name: _ByName, chain: tuple[Path, ...]) -> _Layer:
    """Read a file and everything it extends."""
    content, marks = read_mapping(path, _text(path))
    own = dict(content)
    base = own.pop("extends", None)
    own.setdefault("name", path.stem)
    _anchor_source(own, path)
    if base is None:
        return _Layer(content=own, marks=marks)
    under = _base(base, marks[("extends",)], path, by_name, chain)
    return _Layer(content=merged(under.content, own), marks={**under.marks, **marks})


def _base(
    base: object, where: str, path: Path, by_name: _ByName, chain: tuple[Path, ...]
) -> _Layer:
    """What `extends` names."""
    if not isinstance(base, str):
        raise InvalidDefinition(
            f"{where}: extends is {problems.shown(base)}: expected the name of a definition, or a .yaml file"
        )
    if base.endswith(_SUFFIXES):
        other = path.parent / Path(base).expanduser()
        if not other.is_file():
            raise InvalidDefinition(
                f"{where}: extends is {base!r}: there is no file {other}; it is looked for beside {path.name}"
            )
        chain = (*chain, path.resolve())
        if other.resolve() in chain:
            circle = " -> ".join(one.name for one in (*chain, other))
            raise InvalidDefinition(
                f"{where}: extends is {base!r}, which comes back to itself: {circle}; break the circle"
            )
        return _read(other, by_name, chain)
    try:
        return _Layer(content=by_name(base).model_dump(), marks={})
    except DefinitionError as error:
        raise InvalidDefinition(f"{where}: extends is {base!r}: {error}") from error


def _text(path: Path) -> str:
    """The file's text."""
    try:
        data = path.read_bytes()
        if len(data) > _MAX_BYTES:
            raise InvalidDefinition(
                f"{path} has {len(data)} bytes; a definition has at most {_MAX_BYTES}"
            )
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidDefinition(
            f"{path} cannot be read: {error.strerror or error}; expected a YAML file with a definition"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InvalidDefinition(
            f"{path}:{line}: byte {error.object[error.start]:#x} is not UTF-8; save the file as UTF-8"
        ) from error


def _anchor_source(content: dict[str, object], path: Path) -> None:
    """Make a relative model folder relative to the file, not to where the command was typed."""
    model = content.get("model")
    if not isinstance(model, dict):
        return
    source: object = model.get("source")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] (a parsed mapping)
    if isinstance(source, str) and source.startswith(("./", "../")):
        content["model"] = {**model, "source": str((path.parent / source).absolute())}
