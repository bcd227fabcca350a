"""YAML text -> plain values and the line of each field. Knows nothing of definitions.

Stricter than YAML 1.1, whose surprises end in wrong values: `on` and `off` are texts, only true and false are booleans,
a key may not occur twice, and there are no aliases, merge keys or tags.
"""

# PyYAML is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, cast

import yaml

from lilo_definitions.errors import InvalidDefinition

Marks: TypeAlias = Mapping[tuple[str | int, ...], str]
"""`FILE:LINE` of each field; `()` is the file itself."""


_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))
"""Kinds of values that a definition has."""


class _Loader(yaml.SafeLoader):
    """Composes nodes; resolves plain scalars by YAML 1.2's core schema."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases: one line can stand for a million values."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem="an alias (*name); write the value out, or use extends",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
    ("null", r"null|~|", "n~\0"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(f"^(?:{_pattern})$"),
        ["" if one == "\0" else one for one in _first],
    )


def read_mapping(path: Path, text: str) -> tuple[dict[str, object], Marks]:
    """Parse a file that is one mapping.

    Raises:
        InvalidDefinition: it is not; one line that names file and line.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        reader = _Reader(path, loader)
        if not isinstance(node, yaml.MappingNode):
            raise InvalidDefinition(
                f"{path}:1: the file is {_kind(node)}; expected a mapping: extends, name, lora, ..."
            )
        return reader.mapping(node, ()), reader.marks
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InvalidDefinition(f"{path}:{line}: this is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InvalidDefinition(f"{path}:1: this is not YAML: {reason}") from error
    finally:
        loader.dispose()


def _kind(node: yaml.Node | None) -> str:
    if node is None:
        return "empty"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


class _Reader:
    """Walks nodes once; collects lines."""

    def __init__(self, path: Path, loader: _Loader) -> None:
        self.marks: dict[tuple[str | int, ...], str] = {}
        self._path = path
        self._loader = loader

    def mapping(self, node: yaml.MappingNode, at: tuple[str | int, ...]) -> dict[str, object]:
        """Values by key; refuses keys that are no text or come twice."""
        self.marks.setdefault(at, self._line(node))
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            key, where = self._key(key_node), self._line(key_node)
            if key in result:
                first = self.marks[(*at, key)].rpartition(":")[2]
                raise InvalidDefinition(
                    f"{where}: {key} is given twice; the first is in line {first}; remove one"
                )
            self.marks[(*at, key)] = where
            result[key] = self._value(value_node, (*at, key))
        return result

    def _value(self, node: yaml.Node, at: tuple[str | int, ...]) -> object:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            items = cast("list[yaml.Node]", node.value)
            for index, item in enumerate(items):
                self.marks[(*at, index)] = self._line(item)
            return [self._value(item, (*at, index)) for index, item in enumerate(items)]
        if node.tag not in _PLAIN:
            raise InvalidDefinition(
                f"{self._line(node)}: {at[-1]} has the tag {node.tag}; write a plain value"
            )
        return cast(object, self._loader.construct_object(node))

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
            shown = node.value if isinstance(node, yaml.ScalarNode) else _kind(node)
            raise InvalidDefinition(
                f"{self._line(node)}: the key {shown!r} is no field name; expected one of a definition's fields"
            )
        if node.value == "<<":
            raise InvalidDefinition(
                f"{self._line(node)}: merge keys (<<) are not read; use extends"
            )
        return cast(str, node.value)

    def _line(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"
