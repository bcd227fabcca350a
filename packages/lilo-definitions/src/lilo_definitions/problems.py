"""From pydantic's errors to one line that a person can act on: where, which field, its value, what is allowed.

Used for definitions written in YAML (where = the line of the field) and in Python (where = the line of the call).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lilo_definitions.definition import Definition
from lilo_definitions.part import Part

Path: TypeAlias = tuple[str | int, ...]
"""A field inside a definition, as `("lora", "slots")`."""

_PREFIXES: Mapping[str, Path] = MappingProxyType(
    {
        "Definition": (),
        "ModelSpec": ("model",),
        "Lora": ("lora",),
        "Topology": ("topology",),
        "Trainer": ("trainer",),
        "Limits": ("limits",),
        "Sampler": ("sampler",),
        "Pool": ("sampler", "pool"),
        "Deployment": ("deployment",),
    }
)
"""Where a part lies in a definition, by the name of its class: a part that is built alone does not know it."""

_EXPECTED: Mapping[str, str] = MappingProxyType(
    {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "a text",
        "tuple_type": "a list",
        "finite_number": "a finite number",
        "string_too_short": "a text that is not empty",
    }
)
_LONGEST = 80
"""Of a value in a message; a whole part given by mistake would hide the sentence."""


def sentences(error: ValidationError, where: Callable[[Path], str]) -> str:
    """All problems of a definition in one line.

    Args:
        error: what pydantic found.
        where: from a field to `FILE:LINE`.
    """
    prefix = _PREFIXES.get(error.title, ())
    return "; ".join(
        f"{where(path)}: {sentence}"
        for path, sentence in (_sentence(item, prefix) for item in error.errors())
    )


def _sentence(item: ErrorDetails, prefix: Path) -> tuple[Path, str]:
    """The field at fault, and what is wrong with it."""
    path, kind, context = (*prefix, *item["loc"]), item["type"], item.get("ctx", {})
    if kind == "misfit":
        inner = str(context["field"]).split(".")
        value = _inside(item["input"], inner)
        return (*path, *inner), f"{dotted((*path, *inner))} is {shown(value)}: {item['msg']}"
    name = dotted(path)
    if kind == "extra_forbidden":
        return path, f"{name} is {shown(item['input'])}: {_no_such_field(path)}"
    if kind == "missing":
        return path[:-1], f"{name} is missing: {_meaning(path)}"
    return path, f"{name} is {shown(item['input'])}: {_allowed(item)}"


def _allowed(item: ErrorDetails) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    if kind == "literal_error":
        return f"expected {context['expected']}"
    if kind in ("model_type", "model_attributes_type"):
        return f"expected a mapping with {context.get('class_name', 'its')} fields"
    if kind == "string_pattern_mismatch":
        return "expected letters, digits, dots, dashes and underscores, a letter or digit first"
    return item["msg"].removeprefix("Value error, ").replace("Input should be", "expected a value")


def _no_such_field(path: Path) -> str:
    """There is no such field: the nearest, and all there are."""
    part = _part_of(path[:-1])
    fields = list(part.model_fields)
    near = difflib.get_close_matches(str(path[-1]), fields, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    owner = dotted(path[:-1]) or "a definition"
    return f"there is no such field; {hint}{owner} has {', '.join(fields)}"


def _meaning(path: Path) -> str:
    return _part_of(path[:-1]).meanings().get(str(path[-1]), "it must be given")


def _part_of(path: Path) -> type[Part]:
    """The class of the part at this path."""
    part: type[Part] = Definition
    for field in path:
        annotation: object = part.model_fields[str(field)].annotation
        members = cast("tuple[object, ...]", getattr(annotation, "__args__", (annotation,)))
        part = next(m for m in members if isinstance(m, type) and issubclass(m, Part))
    return part


def _inside(value: object, fields: list[str]) -> object:
    """The value of a field inside what was validated, a mapping or a part already built."""
    for field in fields:
        if isinstance(value, Mapping):
            value = cast("Mapping[str, object]", value).get(field)
        else:
            value = getattr(value, field, None)
    return value


def dotted(path: Path) -> str:
    """A field as people write it: `lora.slots`, `lora.targets[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def shown(value: object) -> str:
    """A value, in one line and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
